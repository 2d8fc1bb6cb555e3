"""Trees as batches of packed tokens, and the policy that scores them."""
