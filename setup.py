"""The C extension; everything else is declared in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "orchestrator._seqstate",
            sources=[
                "native/seqstate.c",
                "native/sequences.c",
                "native/blob.c",
                "native/checksum.c",
                "native/durable.c",
            ],
            depends=[
                "native/sequences.h",
                "native/blob.h",
                "native/checksum.h",
                "native/durable.h",
                "native/outcome.h",
            ],
            # -O3 unrolls the checksum's inner loops: four times -O2 where PCLMULQDQ is missing
            extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden"],
        )
    ]
)
