"""The hook: what every process of a profiled command loads when it imports torch."""
