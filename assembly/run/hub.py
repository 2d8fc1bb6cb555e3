"""Sends a directory to a new, private repository of the Hugging Face hub."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from agentenv.base.errors import ConfigError, InfraError
from agentenv.base.installation import needed
from agentenv.base.model_files import brief_reason
from agentenv.contract.server_config import read_key


class HubRepository:
    """A repository that does not exist yet, on the server HF_ENDPOINT, by the token HF_TOKEN.
    Raises ConfigError, before anything is written, where they do not allow it."""

    def __init__(self, name: str) -> None:
        token = read_key("HF_TOKEN", "--push")
        needed("huggingface_hub.utils", "train", "--push").disable_progress_bars()
        from huggingface_hub import HfApi

        self.name, self._api = name, HfApi(os.environ.get("HF_ENDPOINT"), token)
        try:
            is_there = self._api.repo_exists(name)
        except Exception as error:  # those of httpx are not of one kind in all releases
            raise ConfigError(
                f"--push: the hub refuses {name} ({brief_reason(error)}); check the name, "
                "HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and the network"
            ) from error
        if is_there:
            raise ConfigError(f"--push: {name} exists; choose another name or hf upload {name} OUT")

    def push(self, folder: Path) -> str:
        """Create it with the files of a directory; returns its address. Raises InfraError, with
        the command that sends them."""
        try:
            address = self._api.create_repo(self.name, private=True)
            self._api.upload_folder(repo_id=self.name, folder_path=folder)
            return str(address)
        except Exception as error:
            raise InfraError(
                f"--push: {folder} is complete, but not on the hub "
                f"({brief_reason(error.__cause__ or error)}); "
                f"send it: hf upload --private {self.name} {shlex.quote(str(folder))}"
            ) from error
