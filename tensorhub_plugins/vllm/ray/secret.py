"""How the secret of a job's own hub gets to the processes of the job: they ask the hub's actor, by its name.

So it is in no configuration, log or command line, and there is nothing to set. It stays in the environment of the
process that asked, where the clients look and vLLM's processes inherit it.
"""

from __future__ import annotations

import os
from pathlib import Path

import ray

from tensorhub_plugins.core import SECRET_VARIABLE, Keys, keys_from_environment, new_secret
from tensorhub_plugins.vllm.ray.actor_handles import answer

TIMEOUT_S = 300.0  # as long as the hub may take to start


def choose() -> Keys:
    """Choose the secret of a hub that is about to be started: what the environment names, else Ray's own token, else a
    new one."""
    return keys_from_environment() or _of_ray() or new_secret()


def actor_name(job: str | None = None) -> str:
    """Return the name by which all processes of the job find it. job: Ray's id of it; None: this one."""
    return f"tensorhub_hub_{ray.get_runtime_context().get_job_id() if job is None else job}"


def learn() -> str | None:
    """Have this process, and those that it starts, use the secret of the hub that this job has started, if it has. What
    the environment of the node says comes first. Returns it."""
    if keys_from_environment() is None and ray.is_initialized():
        try:
            actor = ray.get_actor(actor_name())
        except ValueError:
            return None
        os.environ[SECRET_VARIABLE] = answer(actor.secret.remote(), "started the hub", timeout_s=TIMEOUT_S)
    return os.environ.get(SECRET_VARIABLE)


def _of_ray() -> Keys | None:
    """Derive it from the token by which Ray's cluster keeps strangers out, where it has one."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return None
    token = os.environ.get("RAY_AUTH_TOKEN")
    if not token:
        path = Path(os.path.expanduser(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"))
        token = path.read_text("utf-8", "replace") if path.is_file() else ""
    return Keys.parse(token) if token.strip() else None
