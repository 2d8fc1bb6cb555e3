"""Search: backends with a common interface, HTTP traffic, web providers, pages and summaries."""
