"""Agents to start from, and the dataset that the demo runs."""
