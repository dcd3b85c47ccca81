"""Drives the transfer machines of all workers in virtual time over a model of links; baselines, studies and reports."""
