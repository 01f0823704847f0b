// A CUDA device for a torch that was built without CUDA: its memory is the host's, and the CPU's kernels run.
//
// Each operator on tensors of the device runs on CPU tensors that share their memory, and what it returns is
// of the device again: the same memory, the same aliases, the same bits as on the CPU. What a real device
// makes different stays so: operands of two devices are refused, random numbers come from the device's own
// generator, and backward passes run in autograd's thread of the device.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <set>
#include <unordered_map>

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

const c10::Device kDevice(at::kCUDA, 0);

// --- streams and events: everything is done at once, in order ---

double milliseconds() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::Stream stream() const { return c10::Stream(c10::Stream::DEFAULT, kDevice); }

  at::DeviceType type() const override { return at::kCUDA; }
  at::Device exchangeDevice(at::Device) const override { return kDevice; }
  at::Device getDevice() const override { return kDevice; }
  void setDevice(at::Device) const override {}
  void uncheckedSetDevice(at::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(at::Device) const override { return stream(); }
  c10::Stream getNewStream(at::Device, int) const override { return stream(); }
  c10::Stream getStreamFromGlobalPool(at::Device, bool) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new double;
    *static_cast<double*>(*event) = milliseconds();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<double*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return *static_cast<double*>(end) - *static_cast<double*>(start);
  }
};

// --- random numbers: a generator of the device's own, with the CPU's algorithm ---

struct Generator : at::CPUGeneratorImpl {
  Generator() {
    device_ = kDevice;
    key_set_ = DispatchKeySet(DispatchKey::CUDA);
  }
  Generator* clone_impl() const override {
    auto* twin = new Generator();
    copy_state(*const_cast<Generator*>(this), *twin);
    return twin;
  }
  static void copy_state(at::CPUGeneratorImpl& from, at::CPUGeneratorImpl& to) {
    to.set_engine(from.engine());
    to.set_next_float_normal_sample(from.next_float_normal_sample());
    to.set_next_double_normal_sample(from.next_double_normal_sample());
  }
};

const at::Generator& default_generator() {
  static const at::Generator generator = at::make_generator<Generator>();
  return generator;
}

at::CPUGeneratorImpl& state_of(const at::Generator& generator) {
  return *static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
}

// --- memory ---

struct Allocator final : c10::Allocator {
  static void free_memory(void* memory) { free(memory); }
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    if (bytes && posix_memalign(&memory, 64, bytes)) throw std::bad_alloc();
    return {memory, memory, &free_memory, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};

Allocator& allocator() {
  static Allocator instance;
  return instance;
}

// Memory that belongs to `owner`, which lives as long.
c10::DataPtr memory_of(const c10::Storage& owner, c10::Device device) {
  auto* kept = new c10::Storage(owner);
  return {const_cast<void*>(owner.data()), kept, [](void* it) { delete static_cast<c10::Storage*>(it); }, device};
}

c10::Storage storage_of(size_t bytes, c10::DataPtr memory, c10::Allocator* allocator) {
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, std::move(memory), allocator, /*resizable=*/allocator != nullptr);
}

at::Tensor tensor_like(const at::Tensor& other, const c10::Storage& storage, DispatchKey key) {
  TORCH_CHECK_NOT_IMPLEMENTED(other.layout() == at::kStrided, "the host's CUDA device has strided tensors only");
  auto copy = c10::Storage(storage);
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(std::move(copy), DispatchKeySet(key), other.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(other.sizes(), other.strides(), other.storage_offset());
  if (other.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  result._set_conj(other.is_conj());
  result._set_neg(other.is_neg());
  return result;
}

struct Hooks : at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

// --- operators ---

// One call of an operator: its tensors on the CPU, and back.
class Call {
 public:
  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    auto& storage = cpu_[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) {
      const auto& own = tensor.storage();
      storage = storage_of(own.nbytes(), memory_of(own, at::kCPU), c10::GetCPUAllocator());
      own_.emplace(storage.unsafeGetStorageImpl(), own);
    }
    auto alias = tensor_like(tensor, storage, DispatchKey::CPU);
    aliases_[alias.unsafeGetTensorImpl()] = {alias, tensor};
    return alias;
  }

  at::Generator to_cpu(const at::Generator& generator) {
    TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
    auto twin = at::make_generator<at::CPUGeneratorImpl>();
    Generator::copy_state(state_of(generator), state_of(twin));
    generators_.emplace_back(generator, twin);
    return twin;
  }

  // The operator has run: bring what it resized, and where its random numbers have come to, to the device.
  void finish() {
    for (auto& [generator, twin] : generators_) Generator::copy_state(state_of(twin), state_of(generator));
    for (auto& [storage, own] : own_) {
      if (storage->data() != own.data()) {
        const auto bytes = storage->nbytes();
        const auto moved = storage_of(bytes, storage->set_data_ptr({nullptr, at::kCPU}), nullptr);
        own.unsafeGetStorageImpl()->set_data_ptr_noswap(memory_of(moved, kDevice));
      }
      own.unsafeGetStorageImpl()->set_nbytes(storage->nbytes());
    }
    for (auto& [_, pair] : aliases_) {
      const auto& [alias, tensor] = pair;
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }

  at::Tensor to_device(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    const auto alias = aliases_.find(tensor.unsafeGetTensorImpl());
    if (alias != aliases_.end()) return alias->second.second;
    auto& own = own_[tensor.storage().unsafeGetStorageImpl()];
    if (!own) own = storage_of(tensor.storage().nbytes(), memory_of(tensor.storage(), kDevice), &allocator());
    return tensor_like(tensor, own, DispatchKey::CUDA);
  }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> cpu_;  // by the device's
  std::unordered_map<c10::StorageImpl*, c10::Storage> own_;  // the device's, by the CPU's
  std::unordered_map<c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> aliases_;
  std::vector<std::pair<at::Generator, at::Generator>> generators_;
};

std::string name_of(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// What takes tensors of both devices on a real one, too.
bool takes_both_devices(const std::string& name) {
  static const std::set<std::string> names{
      "aten::copy_", "aten::_copy_from", "aten::index.Tensor", "aten::_unsafe_index.Tensor", "aten::index_put",
      "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put", "aten::_pack_padded_sequence",
      "aten::_ctc_loss", "aten::_ctc_loss_backward", "aten::repeat_interleave.Tensor"};
  return names.count(name) > 0;
}

void run_on_host(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call;
  bool on_device = false, on_host = false;
  auto moved = [&](const at::Tensor& tensor) {
    if (tensor.defined()) {
      on_device |= tensor.is_cuda();
      on_host |= tensor.is_cpu() && tensor.dim() > 0;
    }
    return call.to_cpu(tensor);
  };
  auto arguments = torch::jit::pop(*stack, schema.arguments().size());
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& value = arguments[i];
    if (value.isTensor()) {
      value = moved(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& tensor : value.toTensorVector()) list.push_back(moved(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<at::Tensor>(moved(*tensor)) : std::nullopt);
      value = list;
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    } else if (value.isGenerator()) {
      value = call.to_cpu(value.toGenerator());
    } else if (value.isNone() && schema.arguments()[i].name() == "generator") {
      value = call.to_cpu(default_generator());
    }
  }
  const auto name = name_of(op.operator_name());
  TORCH_CHECK(
      !(on_device && on_host) || takes_both_devices(name),
      "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (", name, ")");
  for (auto& value : arguments) stack->push_back(std::move(value));
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  call.finish();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.to_device(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& tensor : value.toTensorVector()) list.push_back(call.to_device(tensor));
      value = list;
    }
  }
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator(), DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype),
      format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator(), DispatchKeySet(DispatchKey::CUDA),
      c10::dtype_or_default(dtype));
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  TORCH_CHECK(source.device().is_cuda(), "Attempted to set the storage of a tensor on cuda:0 to one on the CPU");
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size).vec();
  auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  const auto contiguous = c10::contiguous_strides(sizes);
  if (strides.size() != sizes.size()) strides = contiguous;
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(sizes, strides, offset.guard_int(__FILE__, __LINE__));
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const c10::SymInt size = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize()), stride = 1;
  return set_storage(self, std::move(source), 0, size, stride);
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  return set_whole_storage(self, storage_of(0, allocator().allocate(0), &allocator()));
}

// A GPU has one kernel for dropout, and so another operator in graphs than the CPU.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || !input.numel())
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  const auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {p == 1 ? at::zeros_like(input) : input.mul(mask).mul_(1 / (1 - p)), mask};
}

int64_t unfused_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;
}

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard);
namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", ::Hooks);
namespace native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &::unfused_attention)
}
}  // namespace at

static const bool allocates = [] {
  c10::SetAllocator(at::kCUDA, &allocator());
  return true;
}();

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("native_dropout", native_dropout);
  const std::set<std::string> own{
      "aten::empty.memory_format", "aten::empty_strided", "aten::set_.source_Storage_storage_offset",
      "aten::set_.source_Storage", "aten::set_.source_Tensor", "aten::set_", "aten::native_dropout"};
  // They ask for the device before they call another operator, and know nothing of this one.
  const std::set<std::string> composite{
      "aten::copy_", "aten::convolution", "aten::_convolution", "aten::convolution_backward"};
  // With a kernel of the CPU, it runs as it is there; the fallback alone would take some apart.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& operator_name : dispatcher.getAllOpNames()) {
    const auto name = name_of(operator_name);
    const auto handle = dispatcher.findOp(operator_name);
    if (name.rfind("aten::", 0) || !handle || own.count(name)) continue;
    if (handle->hasKernelForDispatchKey(DispatchKey::CPU) || composite.count(name))
      m.impl(name.c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

TORCH_LIBRARY(host_cuda, m) {
  m.def("default_generator() -> Generator?", []() -> std::optional<at::Generator> { return default_generator(); });
}
