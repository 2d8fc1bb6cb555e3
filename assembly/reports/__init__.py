"""Reports of a run: rows, tables, plots, and monitors such as TensorBoard."""
