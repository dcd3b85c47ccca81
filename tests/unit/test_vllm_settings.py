"""How a vLLM engine is told where to join, without vLLM."""

from __future__ import annotations

import pytest

from weightbridge.errors import UsageError
from weightbridge.integrations.vllm_seat import JoinSettings

ENVIRONMENT = {
    "WEIGHTBRIDGE_ENDPOINT": "tcp://10.0.0.1:29700",
    "WEIGHTBRIDGE_ENGINE": "a",
    "WEIGHTBRIDGE_TOKEN": "secret",
    "WEIGHTBRIDGE_OPTIONS": '{"stage_receive": true, "transports": ["tcp"], "expected_unused": ["rotary"]}',
    "WEIGHTBRIDGE_PREFIX_CACHE": "",
    "OTHER": "x",
}


def test_from_the_environment() -> None:
    settings = JoinSettings.from_environment(ENVIRONMENT)
    assert (settings.endpoint, settings.engine, settings.checkpoint) == ("tcp://10.0.0.1:29700", "a", "")
    assert settings.prefix_cache == "reset"
    options = settings.session_options()
    assert (options.token, options.stage_receive, options.transports) == (b"secret", True, ("tcp",))
    assert options.expected_unused == frozenset({"rotary"})
    assert "secret" not in repr(settings)


def test_what_is_given_overrules_the_environment_and_what_is_empty_does_not() -> None:
    settings = JoinSettings.from_environment(ENVIRONMENT, engine="b", endpoint="", prefix_cache="salt", options={})
    assert (settings.endpoint, settings.engine, settings.prefix_cache) == ("tcp://10.0.0.1:29700", "b", "salt")
    assert settings.session_options().stage_receive


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"WEIGHTBRIDGE_OPTIONS": "{"}, "WEIGHTBRIDGE_OPTIONS is not JSON"),
        ({"WEIGHTBRIDGE_OPTIONS": "[1]"}, "must be a JSON object"),
        ({"WEIGHTBRIDGE_OPTIONS": '{"slots": 1}'}, "slots"),
        ({"WEIGHTBRIDGE_OPTIONS": '{"idle_install": true}'}, "idle_install is not for vLLM"),
        ({"WEIGHTBRIDGE_PREFIX_CACHE": "drop"}, "must be one of reset, salt, none, got 'drop'"),
    ],
)
def test_what_cannot_be_read_is_named(environ: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        JoinSettings.from_environment(environ).session_options()
