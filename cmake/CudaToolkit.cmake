# To be included before find_package(Torch): which CUDA toolkit its package takes, or that it takes none.
if(DEFINED ENV{CUDA_HOME})
  set(CUDAToolkit_ROOT "$ENV{CUDA_HOME}")
endif()
find_package(CUDAToolkit QUIET)
if(CUDAToolkit_FOUND AND EXISTS "${CUDAToolkit_BIN_DIR}/nvcc" AND NOT "$ENV{FORCE_CPU}")
  # By itself, it would take the folder of an nvcc on PATH, which may only call the one of the toolkit.
  get_filename_component(toolkit "${CUDAToolkit_BIN_DIR}" DIRECTORY)
  set(CUDA_TOOLKIT_ROOT_DIR "${toolkit}" CACHE PATH "The CUDA toolkit")
  set(CMAKE_CUDA_COMPILER "${CUDAToolkit_BIN_DIR}/nvcc" CACHE FILEPATH "The CUDA compiler")
elseif(NOT TARGET torch::cudart)
  # The package of a torch with CUDA fails without a toolkit, which the library for CPUs does not need.
  # Where this target is there already, it looks for none.
  add_library(torch::cudart INTERFACE IMPORTED)
endif()
