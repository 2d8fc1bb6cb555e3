"""The commands: `agentenv COMMAND`, each a file here."""
