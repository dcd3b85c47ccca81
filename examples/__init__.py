"""Whole programs that use the library as an application would. They run from a checkout; nothing of them is installed."""
