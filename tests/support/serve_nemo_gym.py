"""Serves a resources server of NeMo Gym without its head server: `serve_nemo_gym.py MODULE:CLASS PORT`.

It runs in NeMo Gym's environment.
"""

from __future__ import annotations

import importlib
import sys

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import DictConfig

if __name__ == "__main__":
    (module, _, name), port = sys.argv[1].partition(":"), int(sys.argv[2])
    made = getattr(importlib.import_module(f"resources_servers.{module}.app"), name)
    place = {"host": "127.0.0.1", "port": port}
    client = ServerClient(head_server_config=BaseServerConfig(**place), global_config_dict=DictConfig({}))
    config = made.model_fields["config"].annotation(**place, entrypoint="app.py", name="served")
    uvicorn.run(made(config=config, server_client=client).setup_webserver(), **place)
