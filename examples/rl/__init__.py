"""GRPO on real weights: FSDP2 trainers in one environment, a vLLM engine in another, weights sent after every step.

    python -m examples.rl --steps 50           one run: a JSON document, a plot, a verdict
    python -m examples.rl.suite                all modes, the controls, and the same by broadcast and by files

`run` starts processes and judges; `trainer` and `engine` are those processes; `grpo` is the algorithm; `updates` is how weights
travel (the library, or one of the two other ways); `channel` carries prompts one way and samples the other.
"""
