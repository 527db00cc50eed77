"""What `sysconfig` reads about the build; a guest builds nothing, so only the names that libraries ask for."""

build_time_vars = {
    "ABIFLAGS": "",
    "EXT_SUFFIX": ".so",
    "HOST_GNU_TYPE": "wasm32-unknown-wasi",
    "MULTIARCH": "wasm32-wasi",
    "Py_DEBUG": 0,
    "Py_ENABLE_SHARED": 0,
    "Py_GIL_DISABLED": 0,
    "SOABI": "cpython-313-wasm32-wasi",
    "TZPATH": "",
    "VERSION": "3.13",
    "WITH_PYMALLOC": 0,
    "prefix": "",
    "exec_prefix": "",
}
