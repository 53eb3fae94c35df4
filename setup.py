"""Builds the reduction kernel. Where there is no compiler the package still installs and NumPy does the work."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "tensortap.reduce._kernel",
            sources=["src/tensortap/reduce/_kernel.c"],
            depends=["src/tensortap/reduce/_kernel_body.h", "src/tensortap/reduce/_kernel_pass.h"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing", "-pthread", "-Wall", "-Wextra"],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
