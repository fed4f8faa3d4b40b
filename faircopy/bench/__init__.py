"""Workloads and equipment for measuring the engine."""
