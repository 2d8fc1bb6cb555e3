"""Data: files into rows, rows into tasks, tasks in order."""
