# Torch's package looks for the CUDA toolkit by an nvcc on PATH, which may be a wrapper's folder.
if(DEFINED ENV{CUDA_HOME})
  set(CUDA_TOOLKIT_ROOT_DIR "$ENV{CUDA_HOME}" CACHE PATH "The CUDA toolkit")
  set(CMAKE_CUDA_COMPILER "$ENV{CUDA_HOME}/bin/nvcc" CACHE FILEPATH "The CUDA compiler")
endif()
