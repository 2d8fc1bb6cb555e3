"""Clients of engine servers over HTTP."""
