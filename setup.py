"""Builds the reduction kernel. Where there is no compiler the package still installs and NumPy does the work."""

from setuptools import Extension, setup

HERE = "src/tensortap/reduce"

setup(
    ext_modules=[
        Extension(
            "tensortap.reduce._kernel",
            sources=[f"{HERE}/_kernel.c"],
            depends=[f"{HERE}/_kernel_body.h", f"{HERE}/_kernel_pass.h"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            extra_compile_args=[
                "-O3",
                "-ffp-contract=off",  # the same sums, to the last bit, at every instruction level
                "-fno-math-errno",
                "-fno-strict-aliasing",
                "-pthread",
                "-Wall",
                "-Wextra",
            ],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
