"""A warm Python sandbox: sessions take milliseconds, calls a fraction of one."""
