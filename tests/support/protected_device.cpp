// A torch device for tests, "protected": no address of it can be read or written.
//
// Where a tensor of it points to, nothing is mapped that anybody may touch. Its bytes lie elsewhere, in host memory that
// only the kernels below know of (`bytes_of`). Whoever takes a pointer of the device for one of the host, torch, a socket
// or us, dies of SIGSEGV at that instruction, in any thread and at any time: nothing is ever unprotected. There are two
// such devices. What has no kernel here runs on the CPU, on copies, and views are those of the CPU, which read no byte.
//
//     torch.ops.protected_device.over(flat)          a uint8 tensor of the device whose bytes are those of a host's
//     torch.ops.protected_device.later(tensor, 7)    queues a kernel, which runs when somebody waits for the device

#include <sys/mman.h>

#include <deque>
#include <functional>
#include <map>
#include <mutex>

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex DEVICES = 2;
thread_local c10::DeviceIndex current = 0;

// --- memory ---

struct Block {
  char* start;
  size_t size_bytes;
  char* bytes;
  c10::DataPtr owner;  // of the bytes
};

std::mutex lock;
std::map<char*, Block*> blocks;  // by where they end

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> guard(lock);
    blocks.erase(block->start + block->size_bytes);
  }
  munmap(block->start, block->size_bytes);
  delete block;
}

// Memory of the current device whose bytes are these.
c10::DataPtr protect(c10::DataPtr owner, size_t size_bytes) {
  const c10::Device device(TYPE, current);
  if (!size_bytes) return {nullptr, device};
  void* start = mmap(nullptr, size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK_WITH(OutOfMemoryError, start != MAP_FAILED, "no addresses for ", size_bytes, " bytes");
  auto* bytes = static_cast<char*>(owner.get());
  auto* block = new Block{static_cast<char*>(start), size_bytes, bytes, std::move(owner)};
  std::lock_guard<std::mutex> guard(lock);
  blocks[block->start + size_bytes] = block;
  return {start, block, &release, device};
}

char* bytes_at(void* address) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = blocks.upper_bound(static_cast<char*>(address));
  TORCH_CHECK(found != blocks.end() && found->second->start <= address, address, " is none of the device's memory");
  return found->second->bytes + (static_cast<char*>(address) - found->second->start);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size_bytes) override {
    return protect(c10::GetCPUAllocator()->allocate(size_bytes), size_bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    if (count) memcpy(bytes_at(target), bytes_at(const_cast<void*>(source)), count);
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(TYPE, &allocator)

// The tensor on the host: its own memory where it lies there, else its bytes.
at::Tensor bytes_of(const at::Tensor& tensor) {
  if (!tensor.device().is_privateuseone()) return tensor;
  const auto options = tensor.options().device(at::kCPU);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(bytes_at(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
}

// --- the device and its queue ---

std::mutex queue_lock;
std::deque<std::function<void()>> queue;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(TYPE, std::exchange(current, device.index()));
  }
  c10::Device getDevice() const override { return c10::Device(TYPE, current); }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    std::lock_guard<std::mutex> guard(queue_lock);
    for (; !queue.empty(); queue.pop_front()) queue.front()();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size_bytes) const override {
    auto made = allocator.allocate(size_bytes);
    allocator.copy_data(made.get(), storage.data(), std::min(size_bytes, storage.nbytes()));
    storage.set_data_ptr(std::move(made));
    storage.set_nbytes(size_bytes);
  }
};
const bool has_hooks = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// --- kernels ---

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  bytes_of(target).copy_(bytes_of(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

void on_the_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  at::native::cpu_fallback(operation, stack, /*error_on_views=*/true);
}

at::Tensor over(const at::Tensor& flat) {
  TORCH_CHECK(flat.is_cpu() && flat.is_contiguous() && flat.scalar_type() == at::kByte, "a flat uint8 of the host");
  auto* kept = new at::Tensor(flat);
  c10::DataPtr owner(flat.data_ptr(), kept, [](void* it) { delete static_cast<at::Tensor*>(it); }, at::kCPU);
  const auto size_bytes = flat.nbytes();
  at::Storage storage(c10::Storage::use_byte_size_t(), size_bytes, protect(std::move(owner), size_bytes), &allocator);
  auto made = empty({0}, at::kByte, std::nullopt, c10::Device(TYPE, current), std::nullopt, std::nullopt);
  return at::native::set_storage_cpu_(made, storage, 0, flat.sizes(), flat.strides());
}

void later(at::Tensor tensor, int64_t value) {
  std::lock_guard<std::mutex> guard(queue_lock);
  queue.emplace_back([tensor, value] { bytes_of(tensor).fill_(value); });
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}

TORCH_LIBRARY(protected_device, m) {
  m.def("over(Tensor flat) -> Tensor", over);
  m.def("later(Tensor tensor, int value) -> ()", later);
}
