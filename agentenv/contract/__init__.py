"""The interfaces of environments, tools, engines and plans, and the HTTP client."""
