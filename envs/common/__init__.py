"""Parts that tools and graders share: worker processes and the cache of results."""
