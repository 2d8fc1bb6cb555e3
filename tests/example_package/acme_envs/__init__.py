"""Environments of a third party. Importing the package imports none of them."""
