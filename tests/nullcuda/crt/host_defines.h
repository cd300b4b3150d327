// The header of this name comes with CUDA's compiler, which the packages of torch do not bring. CUDA's other headers want these.
#pragma once
#define __host__
#define __device__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_CB
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
