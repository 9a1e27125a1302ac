// Stands for NVIDIA's libcuda, by NVIDIA's own header: what cuda_ipc/driver.py calls has these names and arguments.
// One allocation has a handle, at LEGACY; another, at POOLED, has none. What is opened appears at MAPPED.
#include <cuda.h>
#include <string.h>

#define LEGACY 0x700000000000ULL
#define POOLED 0x710000000000ULL
#define MAPPED 0x720000000000ULL
#define SIZE 0x5000000000ULL // more than 32 bits

static __thread int contexts = 0;
static __thread CUcontext current = 0;
static int open_now = 0;

int fake_contexts(void) { return contexts; }
int fake_open(void) { return open_now; }

CUresult CUDAAPI cuInit(unsigned int flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal + 40;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    memset(uuid->bytes, device, sizeof uuid->bytes);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)(0x7fffffff0000ULL + device);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext context) {
    contexts++;
    current = context;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext *context) {
    *context = current;
    current = 0;
    contexts--;
    return CUDA_SUCCESS;
}

static int is_wrong(void) { return current != (CUcontext)(0x7fffffff0000ULL + 41); } // of device 1

CUresult CUDAAPI cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    if (is_wrong()) return CUDA_ERROR_INVALID_CONTEXT;
    if (attribute != CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE) return CUDA_ERROR_INVALID_VALUE;
    *(unsigned char *)data = address >= LEGACY && address < POOLED; // a bool in some releases: one byte is written
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    if (is_wrong()) return CUDA_ERROR_INVALID_CONTEXT;
    *base = address >= MAPPED ? MAPPED : LEGACY;
    *size = SIZE;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    if (is_wrong() || address != LEGACY) return CUDA_ERROR_INVALID_VALUE;
    for (int at = 0; at < CU_IPC_HANDLE_SIZE; at++) handle->reserved[at] = at % 3 ? at : 0; // with zeros inside
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
    if (is_wrong() || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
    for (int at = 0; at < CU_IPC_HANDLE_SIZE; at++)
        if (handle.reserved[at] != (at % 3 ? at : 0)) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    *address = MAPPED;
    open_now++;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr address) {
    if (is_wrong() || address != MAPPED) return CUDA_ERROR_INVALID_VALUE;
    open_now--;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_PEER_ACCESS_UNSUPPORTED ? "peer access is not supported" : "something else";
    return CUDA_SUCCESS;
}
