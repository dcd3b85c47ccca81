"""The published test kit: strategies for random jobs, an in-memory driver, a model checker, conformance suites.

Nothing here is imported by the library itself. Modules are imported one by one, because some need pytest or hypothesis.
"""

__all__: list[str] = []
