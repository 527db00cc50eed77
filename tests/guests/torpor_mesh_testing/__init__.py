"""The three services as real processes, and what tests declare and ask around them.

async with Mesh(control_plane, folder, python_runtime=…) as mesh:
    await mesh.ready()
    await mesh.kill9("cache")
"""

from torpor_mesh_testing.cluster import (
    EXAMPLE_KINDS,
    WASM_OPERATORS,
    condition_of,
    conditions_of,
    install_kinds,
    install_torpor,
    mirror_rules,
    operator_object,
)
from torpor_mesh_testing.mesh import SERVICES, Mesh, MeshOptions

__all__ = [
    "EXAMPLE_KINDS",
    "SERVICES",
    "WASM_OPERATORS",
    "Mesh",
    "MeshOptions",
    "condition_of",
    "conditions_of",
    "install_kinds",
    "install_torpor",
    "mirror_rules",
    "operator_object",
]
