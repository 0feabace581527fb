"""The plan of the house: the floors of its rooms, and what the service may use of the core. `house.py` checks it."""

from __future__ import annotations

SERVICE = "echo2_service"

#: Floors, from the ground up. A room imports from lower floors only, and knows no other room of its own floor.
FLOORS = (
    ("core",),
    ("config", "sandbox", "transport"),
    ("weights", "reward", "tasks"),
    ("engines",),
    ("rollouts", "learner"),
    ("head", "worker"),
    ("models", "planning", "views"),
    ("launch",),
    ("api", "cli", "demo"),
)
FLOOR_OF_ROOM = {room: floor for floor, rooms in enumerate(FLOORS, 1) for room in rooms}
#: Single files beside the rooms: the room that each belongs to.
ROOM_OF_FILE = {"__main__": "cli", "trl": "api"}
#: Floors within a room, from the ground up; "" is what lies in the room itself. Folders on one line are one household:
#: its files know each other, and form no circle. The planner is one machine in three folders. Other rooms have none.
FOLDERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "core": (("",), ("decide",)),
    "weights": (("format", "broadcast.decide"), ("store",), ("broadcast",), ("",)),
    "learner": (("decide",), ("core",), ("link",), ("grpo",), ("",)),
    "worker": (("decide",), ("",)),
    "head": (
        ("decide", "fleet.decide", "store.decide", "strangers.decide"),
        ("fleet", "ledger", "strangers"),
        ("store",),
        ("serve",),
        ("",),
    ),
    "planning": (("sim",), ("",)),
    SERVICE: (("decide",), ("",), ("learner", "fleet"), ("sampler",), ("front",), ("commands",)),
}
#: All that the service may import of the core: the room `core`, on which everything stands, and these modules.
SEAMS = frozenset(
    {"echo2.cli.adding"}
    | {"echo2.config.rundir", "echo2.config.sections"}
    | {"echo2.core"}
    | {
        "echo2.engines.compact",
        "echo2.engines.decode_loop",
        "echo2.engines.engine",
        "echo2.engines.many_policies",
        "echo2.engines.model_values",
        "echo2.engines.prefill",
        "echo2.engines.tokenizer",
    }
    | {"echo2.head.serve.connections", "echo2.head.strangers.tickets"}
    | {
        "echo2.learner.core.adapters",
        "echo2.learner.core.batch",
        "echo2.learner.core.checkpoint",
        "echo2.learner.core.datum",
        "echo2.learner.core.losses",
        "echo2.learner.core.trainer",
    }
    | {
        "echo2.transport.base",
        "echo2.transport.sockets",
        "echo2.transport.grpc_link",
        "echo2.transport.grpc_server",
        "echo2.transport.identity",
        "echo2.transport.limits",
        "echo2.transport.wire_pb2",
    }
    | {"echo2.rollouts.chat_forms"}
    | {"echo2.views.assets"}
    | {
        "echo2.weights.broadcast.distribution",
        "echo2.weights.broadcast.origin",
        "echo2.weights.broadcast.peer",
        "echo2.weights.format.adapter_files",
        "echo2.weights.format.segments",
        "echo2.weights.format.manifest",
        "echo2.weights.format.model_files",
        "echo2.weights.store.archive",
        "echo2.weights.store.content",
        "echo2.weights.store.store",
    }
    | {"echo2.worker.joining", "echo2.worker.worker_process"}
)
