"""Says in its log what an image must not repeat: random names, the clock, the configuration as it is now."""

import json
import random
import secrets
import time
import uuid

from torpor_sdk import Kube, Operator, Request, config, env, log

# Used before the image is taken, as libraries do when they are imported.
EARLY = (random.random(), uuid.uuid4(), secrets.token_hex(8))
STARTED_NS = time.monotonic_ns()

op = Operator(for_="example.com/v1/widgets")


@op.reconcile
def reconcile(request: Request, kube: Kube) -> None:
    said = {
        "names": {
            "random": random.random().hex(),
            "uuid": str(uuid.uuid4()),
            "secrets": secrets.token_hex(8),
        },
        "monotonic_ns": time.monotonic_ns() - STARTED_NS,
        "settings": {"config": config(), "env": dict(env)},
    }
    log.info("%s", json.dumps(said))
