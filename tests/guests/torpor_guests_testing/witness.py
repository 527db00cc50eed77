"""`tests/guests/witness` in each language: says what an image must not repeat."""

from torpor_guests_testing.guests import Guest, go_module, rust_module, zig_module
from torpor_guests_testing.toolchains import ROOT

WITNESS = ROOT / "tests" / "guests" / "witness"


def witness(language: str) -> Guest:
    """Raises BuildFailed."""
    match language:
        case "zig":
            path = zig_module(WITNESS / "zig" / "witness.zig", "")
        case "rust":
            path = rust_module(WITNESS / "rust", "witness", {})
        case "go":
            path = go_module(WITNESS / "go", "")
        case "python":
            path = WITNESS / "python" / "witness.py"
        case _:
            raise ValueError(f"there is no witness in {language}")
    return Guest(language, "witness", path, ".py" if language == "python" else ".wasm")
