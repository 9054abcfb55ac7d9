"""Agents to start from, and the dataset that the demo runs.

In code of your own import the same names from `rollout`.
"""
