"""Compiles Python modules to marshalled code; run by the interpreter that the guest has, for the guest.

Reads lines `name<TAB>0 or 1 (a package)<TAB>path` from standard input. Writes the code of all modules, one after the
other, to the file named by the first argument, and `name<TAB>0 or 1<TAB>offset<TAB>length` lines to the second.
The order of the input is kept: marshalling depends on what was compiled before, so a sorted input is what makes
the output the same each time.
"""

import marshal
import sys
import tokenize
from pathlib import Path


def main() -> None:
    code_path, index_path = map(Path, sys.argv[1:])
    offset = 0
    with code_path.open("wb") as code_file, index_path.open("w", encoding="utf-8") as index:
        for line in sys.stdin:
            name, package, path = line.rstrip("\n").split("\t")
            code = marshalled(name, path)
            code_file.write(code)
            index.write(f"{name}\t{package}\t{offset}\t{len(code)}\n")
            offset += len(code)


def marshalled(name: str, path: str) -> bytes:
    with tokenize.open(path) as file:
        source = file.read()
    # Not the path: it would differ from machine to machine, and there is no such file in a guest.
    return marshal.dumps(compile(source, f"<frozen {name}>", "exec", dont_inherit=True, optimize=0))


if __name__ == "__main__":
    main()
