"""A warm Python sandbox: sessions cost milliseconds, calls a fraction of one."""
