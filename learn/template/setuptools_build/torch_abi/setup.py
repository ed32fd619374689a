minor = ".".join(torch.__version__.split(".")[:2])
name = f"_C_torch{minor.replace('.', '_')}"  # as in my_ops/_library.py
if sys.platform == "linux":
    cxx_flags.append("-fopenmp")  # not for the linker, for torch brings the runtime
extension = cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension

setup(
    ext_modules=[library(extension, name, sources + cuda_sources * cuda)],
    install_requires=[f"torch=={minor}.*"],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310", "build_number": minor}},
)
