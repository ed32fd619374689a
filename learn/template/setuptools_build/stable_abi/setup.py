# The headers of any torch, but of them only what 2.11 has, which each later torch keeps.
cxx_flags.append("-DTORCH_TARGET_VERSION=0x020b000000000000")
nvcc_flags += [cxx_flags[-1], "-DUSE_CUDA"]
libraries = [library(cpp_extension.CppExtension, "_C", sources)]
if cuda:
    # A library of its own, for it asks for parts of torch that a torch for the CPU lacks.
    name = f"_C_cuda{torch.version.cuda.split('.')[0]}"
    libraries.append(library(cpp_extension.CUDAExtension, name, cuda_sources))

setup(
    ext_modules=libraries,
    install_requires=["torch>=2.11"],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
