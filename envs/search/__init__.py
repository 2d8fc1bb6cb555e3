"""Search: backends behind one interface, the traffic layer, web providers, pages and summaries."""
