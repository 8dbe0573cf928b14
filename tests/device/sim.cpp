// A simulated accelerator behind PrivateUse1: two devices whose memory and kernels are the CPU's, so that results are
// the CPU's too, with what a CPU has not: streams, pinned memory, copies that land late, and a host that waits.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>
#if __has_include(<ATen/core/GraphImplInterface.h>)  // torch 2.13 has torch.accelerator.Graph
#include <ATen/core/GraphImplInterface.h>
#define HAS_GRAPHS
#endif

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace {
namespace py = pybind11;
using at::Tensor;
using c10::Device, c10::DeviceType, c10::DispatchKey, c10::DispatchKeySet, c10::IValue, c10::Storage, c10::Stream;
constexpr auto SIM = DeviceType::PrivateUse1;
constexpr int DEVICES = 2;

// ---- what the tests are told

py::object* observer = nullptr;  // called with what happened, the op's name, and the device's number

struct Recording;
Recording* recording = nullptr;  // of the graph that is captured now, whose work does not run
std::thread::id recorder;
bool spares_other_threads = false;  // what they do beside is no part of the capture, and does not end it

void tell(const char* what, const std::string& name, int device) {
  TORCH_CHECK(recording == nullptr || std::string(what) == "launch", what, " of ", name, " while a graph is captured");
  if (observer == nullptr || !Py_IsInitialized()) return;
  py::gil_scoped_acquire held;
  (*observer)(what, name, device);
}

// ---- streams: copies to the host wait in them until somebody waits for a stream, an event or a device

struct Landing {
  Tensor to, from;
};
struct Queue {
  std::deque<Landing> waiting;
  std::vector<Landing> uploads;  // from pinned memory, which only this stream's own kernels find there so far
  uint64_t landed = 0;
  uint64_t end() const { return landed + waiting.size(); }
  void swap_uploads() {
    for (Landing& one : uploads) {
      Tensor there = one.to.clone();
      one.to.copy_(one.from);
      one.from = there;
    }
  }
  void land(uint64_t until) {
    swap_uploads();
    uploads.clear();
    for (; landed < until && !waiting.empty(); ++landed, waiting.pop_front())
      waiting.front().to.copy_(waiting.front().from);
  }
};
struct Mark {  // an event: a place in a queue
  Device device;
  c10::StreamId stream;
  uint64_t until;
};

std::recursive_mutex lock;
std::map<std::pair<int, c10::StreamId>, Queue> queues;
c10::StreamId streams = 0;
thread_local int current = 0;
thread_local c10::StreamId current_stream[DEVICES] = {0, 0};

Queue& queue_of(int device) { return queues[{device, current_stream[device]}]; }

bool uploads_are_late = false;

struct InStream {  // a kernel runs behind what its own stream has uploaded; other streams have to wait for that
  int device;
  explicit InStream(int device) : device(device) { if (device >= 0) queue_of(device).swap_uploads(); }
  ~InStream() { if (device >= 0) queue_of(device).swap_uploads(); }
};

void land(int device) {
  std::lock_guard held(lock);
  for (auto& [key, queue] : queues)
    if (key.first == device) queue.land(queue.end());
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return SIM; }
  Device exchangeDevice(Device d) const override { return {SIM, static_cast<c10::DeviceIndex>(std::exchange(current, d.index()))}; }
  Device getDevice() const override { return {SIM, static_cast<c10::DeviceIndex>(current)}; }
  void setDevice(Device d) const override { current = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { current = d.index(); }
  Stream stream(Device d, c10::StreamId id) const { return Stream(Stream::UNSAFE, d, id); }
  Stream getStream(Device d) const override { return stream(d, current_stream[d.index()]); }
  Stream getDefaultStream(Device d) const override { return stream(d, 0); }
  Stream getNewStream(Device d, int = 0) const override { return stream(d.has_index() ? d : getDevice(), ++streams); }
  Stream getStreamFromGlobalPool(Device d, bool = false) const override { return getNewStream(d); }
  Stream exchangeStream(Stream s) const override {
    return stream(s.device(), std::exchange(current_stream[s.device_index()], s.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void** event, const Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    std::lock_guard held(lock);
    delete static_cast<Mark*>(*event);
    *event = new Mark{s.device(), s.id(), queues[{s.device_index(), s.id()}].end()};
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  void block(void* event, const Stream&) const override {
    std::lock_guard held(lock);
    if (auto* mark = static_cast<Mark*>(event)) queues[{mark->device.index(), mark->stream}].land(mark->until);
  }
  bool queryEvent(void* event) const override {
    std::lock_guard held(lock);
    auto* mark = static_cast<Mark*>(event);
    return mark == nullptr || queues[{mark->device.index(), mark->stream}].landed >= mark->until;
  }
  void synchronizeEvent(void* event) const override {
    std::lock_guard held(lock);
    if (queryEvent(event)) return;
    auto* mark = static_cast<Mark*>(event);
    queues[{mark->device.index(), mark->stream}].land(mark->until);
    tell("wait", "event", mark->device.index());
  }
#ifdef HAS_GRAPHS
  bool isStreamCapturing(const Stream&) const override { return recording != nullptr; }
#endif
  bool queryStream(const Stream& s) const override { return queues[{s.device_index(), s.id()}].waiting.empty(); }
  void synchronizeStream(const Stream& s) const override {
    std::lock_guard held(lock);
    auto& queue = queues[{s.device_index(), s.id()}];
    queue.land(queue.end());
    tell("wait", "stream", s.device_index());
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    land(device);
    tell("wait", "device", device);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- memory

std::map<const void*, size_t> pinned;

bool has_fp64 = true;

void check_dtype(std::optional<at::ScalarType> dtype) {
  TORCH_CHECK_TYPE(has_fp64 || at::dtype_or_default(dtype) != at::kDouble, "this device has no float64");
}

struct Block {
  size_t bytes;
  uint64_t serial;  // another block may come to lie there
  uint64_t graph;   // whose own memory has it, allocated by the stream that is captured; 0: none's
  int owners = 1;
};
uint64_t graphs = 0, captured = 0;  // how many there were, and the one that is captured now
c10::StreamId captured_stream = 0;
std::map<const void*, Block> blocks;  // of the devices, those that live
uint64_t serials = 0;

void* note(void* data, size_t bytes) {
  std::lock_guard held(lock);
  if (data == nullptr) return data;
  auto known = blocks.find(data);
  if (known != blocks.end())
    ++known->second.owners;
  else
    blocks[data] = {bytes, ++serials, captured_stream == current_stream[current] ? captured : 0};
  return data;
}
void forget(const void* data) {
  std::lock_guard held(lock);
  auto known = blocks.find(data);
  if (known != blocks.end() && --known->second.owners == 0) blocks.erase(known);
}

struct Memory final : c10::Allocator {  // of the current device
  static void release(void* data) {
    forget(data);
    std::free(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? note(std::calloc(bytes, 1), bytes) : nullptr;
    return {data, data, &release, Device(SIM, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
struct PinnedMemory final : c10::Allocator {
  static void release(void* data) {
    std::lock_guard held(lock);
    pinned.erase(data);
    std::free(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(recording == nullptr || (spares_other_threads && recorder != std::this_thread::get_id()),
                "memory of the host was pinned while a graph is captured");
    void* data = std::malloc(std::max<size_t>(bytes, 1));
    std::lock_guard held(lock);
    pinned[data] = std::max<size_t>(bytes, 1);
    return {data, data, &release, DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(SIM, &memory)

bool is_pinned(const void* data) {
  std::lock_guard held(lock);
  auto next = pinned.upper_bound(data);
  if (next == pinned.begin()) return false;
  --next;
  return data < static_cast<const char*>(next->first) + next->second;
}

at::Generator& generator(int device) {  // what the kernels draw from; they are the CPU's, so it is too
  static at::Generator all[] = {at::detail::createCPUGenerator(), at::detail::createCPUGenerator()};
  return all[device];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(c10::DeviceIndex d) const override { current = d; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return std::exchange(current, d); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return std::exchange(current, d); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Device getDeviceFromPtr(void*) const override { return {SIM, static_cast<c10::DeviceIndex>(current)}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return generator(d < 0 ? current : d); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

// ---- a tensor of the device seen as one of the CPU, over the same memory, and back

Tensor over(Storage storage, DispatchKey key, const Tensor& like) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.dim() == 0) impl->set_wrapped_number(like.unsafeGetTensorImpl()->is_wrapped_number());
  return made;
}

Storage borrow(const Storage& storage, Device device, c10::Allocator* allocator) {
  struct Loan {
    Storage storage;
    bool is_noted;
  };
  auto* loan = new Loan{storage, device.type() == SIM && storage.nbytes() > 0};
  auto* data = const_cast<void*>(storage.data());
  if (loan->is_noted) note(data, storage.nbytes());
  auto release = [](void* context) {
    auto* loan = static_cast<Loan*>(context);
    if (loan->is_noted) forget(loan->storage.data());
    delete loan;
  };
  return {Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(data, loan, release, device), allocator, true};
}

Tensor as_cpu(const Tensor& t) {
  return over(borrow(t.storage(), DeviceType::CPU, c10::GetAllocator(DeviceType::CPU)), DispatchKey::CPU, t);
}
Tensor as_sim(const Tensor& t, int device) {
  check_dtype(t.scalar_type());
  return over(borrow(t.storage(), Device(SIM, device), &memory), DispatchKey::PrivateUse1, t);
}

// ---- graphs: what is launched while one is captured is written down with its addresses, and runs when it is replayed

struct Operand {  // a tensor by its address, as a graph knows it: held only if the graph's own pool has it
  void* data;
  uint64_t serial;
  size_t bytes;
  std::optional<Storage> own;
  Tensor like;  // without memory
  Tensor cpu() const {
    if (bytes == 0) return over(Storage(Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, DeviceType::CPU), nullptr, false), DispatchKey::CPU, like);
    auto block = blocks.find(data);
    TORCH_CHECK(block != blocks.end() && block->second.serial == serial, "a graph uses memory that was freed since");
    return over(Storage(Storage::use_byte_size_t(), bytes, c10::DataPtr(data, DeviceType::CPU), nullptr, false), DispatchKey::CPU, like);
  }
};

struct Recording {
  std::vector<std::function<void()>> nodes;
  std::map<const void*, std::pair<Block, std::string>> before;
  std::vector<Tensor> generators;
  uint64_t graph = 0;

  Operand operand(const Tensor& t) const {
    const Storage& storage = t.storage();
    auto* data = const_cast<void*>(storage.data());
    Tensor like = over(Storage(Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, DeviceType::CPU), nullptr, false), DispatchKey::CPU, t);
    auto block = blocks.find(data);
    if (data == nullptr || storage.nbytes() == 0) return {nullptr, 0, 0, std::nullopt, like};
    TORCH_CHECK(block != blocks.end(), "a graph was given memory that nobody allocated");
    const bool is_own = block->second.graph == graph;
    return {data, block->second.serial, storage.nbytes(), is_own ? std::optional(storage) : std::nullopt, like};
  }
};

using Tensors = std::vector<Tensor>;

void record(const Tensors& given, const Tensors& made, std::function<Tensors(const Tensors&)> run) {
  if (recording == nullptr) return;
  std::lock_guard held(lock);
  std::vector<Operand> in, out;
  for (const Tensor& t : given) in.push_back(recording->operand(t));
  for (const Tensor& t : made) out.push_back(recording->operand(t));
  recording->nodes.push_back([in, out, run] {
    Tensors there;
    for (const Operand& operand : in) there.push_back(operand.cpu());
    const Tensors done = run(there);
    for (size_t i = 0; i < out.size(); ++i) {
      Tensor to = out[i].cpu();
      if (to.numel() > 0 && to.const_data_ptr() != done[i].const_data_ptr()) to.copy_(done[i]);
    }
  });
}

std::vector<at::Generator> sources() {  // kernels without a generator among their arguments draw from the CPU's own
  return {generator(0), generator(1), at::detail::getDefaultCPUGenerator()};
}

struct GraphBody {
  Recording tape;
  void begin(bool is_threads_own = false) {
    std::lock_guard held(lock);
    recorder = std::this_thread::get_id();
    spares_other_threads = is_threads_own;
    tape = Recording();
    for (auto& [data, block] : blocks)
      tape.before[data] = {block, std::string(static_cast<const char*>(data), block.bytes)};
    for (auto& one : sources()) tape.generators.push_back(one.get_state());
    tape.graph = captured = ++graphs;
    captured_stream = current_stream[current];
    recording = &tape;
  }
  void end() {  // nothing has run: memory and random states are as they were, and what is new holds nothing yet
    std::lock_guard held(lock);
    recording = nullptr;
    captured = 0;
    for (auto& [data, block] : blocks) {
      auto was = tape.before.find(data);
      if (was != tape.before.end() && was->second.first.serial == block.serial)
        std::memcpy(const_cast<void*>(data), was->second.second.data(), block.bytes);
      else
        std::memset(const_cast<void*>(data), 0xFF, block.bytes);
    }
    auto every = sources();
    for (size_t i = 0; i < every.size(); ++i) every[i].set_state(tape.generators[i]);
    tape.before.clear();
  }
  void replay() {
    at::AutoDispatchBelowADInplaceOrView below;
    for (auto& [data, block] : blocks)  // one block of its own memory may be lent to many tensors, each until the next is written
      if (block.graph == tape.graph) std::memset(const_cast<void*>(data), 0xFF, block.bytes);
    for (auto& node : tape.nodes) node();
    tell("launch", "graph", current);
  }
};

#ifdef HAS_GRAPHS
struct SimGraph final : at::GraphImplInterface {
  explicit SimGraph(const at::GraphImplArgs& = {}) {}
  GraphBody body;
  void capture_begin(at::MempoolId_t = {0, 0}, at::GraphCaptureMode mode = at::GraphCaptureMode::Default) override { body.begin(mode == at::GraphCaptureMode::ThreadLocal); }
  void capture_end() override { body.end(); }
  void instantiate() override {}
  void replay() override { body.replay(); }
  void reset() override { body.tape = Recording(); }
  at::MempoolId_t pool() const override { return {0, 1}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}
};
#endif

// ---- kernels: any op without one of its own runs the CPU's

struct Call {
  const c10::OperatorHandle& op;
  std::vector<std::pair<Tensor, Tensor>> given;  // of the device, of the CPU
  std::vector<Tensor> host;                      // arguments that lie on the host
  int device = -1;

  Tensor down(const Tensor& t) {
    if (!t.defined()) return t;
    if (t.device().type() != SIM) {
      host.push_back(t);
      return t;
    }
    TORCH_CHECK(device < 0 || device == t.device().index(), op.schema().name(), ": tensors on sim:", device, " and sim:",
                t.device().index());
    device = t.device().index();
    for (auto& [sim, cpu] : given)
      if (sim.is_same(t)) return cpu;
    given.emplace_back(t, as_cpu(t));
    return given.back().second;
  }
  IValue down(const IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) return down(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(down(t));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> t : value.toOptionalTensorList())
        list.push_back(t.has_value() ? std::optional(down(*t)) : t);
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == SIM) {
      device = value.toDevice().has_index() ? value.toDevice().index() : current;
      return Device(DeviceType::CPU);
    }
    if (value.isNone() && device >= 0 && argument.type()->str() == "Generator?") return generator(device);
    return value;
  }
  Tensor up(const Tensor& t) {
    if (!t.defined() || device < 0) return t;
    for (auto& [sim, cpu] : given)
      if (cpu.is_same(t)) return sim;
    for (auto& argument : host)
      if (argument.is_same(t)) return t;
    for (auto& [sim, cpu] : given)
      if (cpu.storage().is_alias_of(t.storage())) return over(sim.storage(), DispatchKey::PrivateUse1, t);
    return as_sim(t, device);
  }
  IValue up(const IValue& value) {
    if (value.isTensor()) return up(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(up(t));
    return list;
  }
  void check_host() const {  // a kernel of a device reads numbers of the host, never its arrays
    static const std::set<std::string> copies = {"aten::index", "aten::_index_put_impl_"};
    for (const Tensor& t : host)
      TORCH_CHECK(t.dim() == 0 || device < 0 || copies.count(op.schema().name()), op.schema().name(), ": a tensor on sim:",
                  device, " and one on the CPU");
  }
  void take_resized() const {  // an out= argument may be given without its size
    for (auto& [sim, cpu] : given)
      if (!sim.sizes().equals(cpu.sizes())) {
        at::native::resize_(sim, cpu.sizes(), std::nullopt);
        as_cpu(sim).copy_(cpu);
      }
  }
  bool reads() const {  // the size of the result, or the result itself, is the host's to know
    static const std::set<std::string> ops = {"aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2",
                                              "aten::is_nonzero", "aten::repeat_interleave"};
    if (ops.count(op.schema().name())) return true;
    if (op.schema().name() != "aten::index") return false;
    for (auto& [sim, cpu] : given)
      if (cpu.dtype() == at::kBool && !cpu.is_same(given.front().second)) return true;
    return false;
  }
};

void each_tensor(const IValue& value, const std::function<void(const Tensor&)>& see) {
  if (value.isTensor() && value.toTensor().defined()) see(value.toTensor());
  if (value.isTensorList())
    for (const Tensor& t : value.toTensorVector()) see(t);
  if (value.isOptionalTensorList())
    for (const std::optional<Tensor>& t : value.toOptionalTensorList())
      if (t.has_value() && t->defined()) see(*t);
}
IValue with_tensors(const IValue& value, const std::function<Tensor(const Tensor&)>& change) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(change(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (std::optional<Tensor> t : value.toOptionalTensorList())
      list.push_back(t.has_value() ? std::optional(change(*t)) : t);
    return list;
  }
  return value;
}

void record_op(const Call& call, const std::vector<IValue>& lowered, const torch::jit::Stack& stack) {
  Tensors given, marks, made;  // marks stand for the tensors of the device, which the tape must not hold
  for (auto& [sim, cpu] : call.given) given.push_back(sim), marks.push_back(at::empty({0}));
  const size_t num_returns = call.op.schema().returns().size();
  for (size_t i = stack.size() - num_returns; i < stack.size(); ++i)
    each_tensor(stack[i], [&](const Tensor& t) { made.push_back(t); });
  std::vector<IValue> arguments;
  for (const IValue& value : lowered)
    arguments.push_back(with_tensors(value, [&](const Tensor& t) {
      for (size_t i = 0; i < marks.size(); ++i)
        if (call.given[i].second.is_same(t)) return marks[i];
      if (!t.defined()) return t;
      Tensor number = t.clone();  // of the host, as it is now
      if (t.unsafeGetTensorImpl()->is_wrapped_number()) number.unsafeGetTensorImpl()->set_wrapped_number(true);
      return number;
    }));
  auto op = call.op;
  record(given, made, [op, marks, arguments, num_returns](const Tensors& there) {
    torch::jit::Stack stack;
    for (const IValue& value : arguments)
      stack.push_back(with_tensors(value, [&](const Tensor& t) {
        for (size_t i = 0; i < marks.size(); ++i)
          if (marks[i].is_same(t)) return there[i];
        return t;
      }));
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
    Tensors done;
    for (size_t i = stack.size() - num_returns; i < stack.size(); ++i)
      each_tensor(stack[i], [&](const Tensor& t) { done.push_back(t); });
    return done;
  });
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call{op};
  const auto& schema = op.schema();
  const auto first = stack->size() - schema.arguments().size();
  for (size_t i = 0; i < schema.arguments().size(); ++i) (*stack)[first + i] = call.down((*stack)[first + i], schema.arguments()[i]);
  call.check_host();
  if (call.reads()) {
    land(call.device);
    tell("read", schema.name(), call.device);
  }
  const std::vector<IValue> lowered(stack->begin() + first, stack->end());
  {
    InStream behind(call.device);
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
    call.take_resized();
  }
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    auto& value = (*stack)[stack->size() - 1 - i];
    value = call.up(value);
  }
  if (recording != nullptr && call.device >= 0) record_op(call, lowered, *stack);
  tell("launch", schema.name(), call.device);
}

at::Scalar read(const Tensor& t) {
  land(t.device().index());
  tell("read", "aten::_local_scalar_dense", t.device().index());
  return at::_local_scalar_dense(as_cpu(t));
}

Tensor copy(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool is_up = from.is_cpu(), is_down = to.is_cpu();
  const int device = is_up ? to.device().index() : from.device().index();
  const Tensor source = is_up ? from : as_cpu(from), target = is_down ? to : as_cpu(to);
  if (recording != nullptr && from.numel() > 0) {
    const bool is_late = non_blocking && (!is_up || is_pinned(from.const_data_ptr()));
    TORCH_CHECK(!is_down && (!is_up || is_late), "a copy that waits, or one to the host, while a graph is captured");
    const void* host = is_up ? from.const_data_ptr() : nullptr;
    record(is_up ? Tensors{to} : Tensors{to, from}, {},
           [is_up, host, sizes = from.sizes().vec(), strides = from.strides().vec(), dtype = from.scalar_type()](const Tensors& there) {
             TORCH_CHECK(!is_up || is_pinned(host), "a graph copies from memory of the host that was freed since");
             there[0].copy_(is_up ? at::from_blob(const_cast<void*>(host), sizes, strides, dtype) : there[1]);
             return Tensors();
           });
  }
  if ((is_up || is_down) && from.numel() > 0) {
    const bool waits = !non_blocking || !is_pinned(is_up ? from.const_data_ptr() : to.const_data_ptr());
    std::lock_guard held(lock);
    if (waits) {
      queue_of(device).land(queue_of(device).end());
      tell("blocking copy", is_up ? "cpu to sim" : "sim to cpu", device);
    } else if (is_down) {
      queue_of(device).waiting.push_back({to, source.clone().to(to.scalar_type())});
      std::memset(to.mutable_data_ptr(), 0xFF, to.nbytes());  // nobody may look before it lands
      tell("launch", "aten::copy_", device);
      return to;
    } else if (uploads_are_late) {
      Tensor garbage = at::empty_like(target);
      std::memset(garbage.mutable_data_ptr(), 0xFF, garbage.nbytes());
      queue_of(device).uploads.push_back({target, source.clone().to(target.scalar_type())});
      target.copy_(garbage);
      tell("launch", "aten::copy_", device);
      return to;
    }
  }
  InStream behind(device);
  target.copy_(source);
  tell("launch", "aten::copy_", device);
  return to;
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  check_dtype(dtype);
  c10::DeviceGuard guard(device.value());
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, DispatchKeySet(DispatchKey::PrivateUse1),
                                   at::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  check_dtype(dtype);
  c10::DeviceGuard guard(device.value());
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           DispatchKeySet(DispatchKey::PrivateUse1), at::dtype_or_default(dtype));
}
Tensor view(const Tensor& t, c10::SymIntArrayRef size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor as_strided(const Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional(offset->expect_int()) : std::nullopt);
}
Tensor reshape_alias(const Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
const Tensor& resize(const Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(t, C10_AS_INTARRAYREF_SLOW(size), format);
}
Tensor& set(Tensor& t, Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(t, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_whole(Tensor& t, at::Storage source) {
  const int64_t numel = source.nbytes() / t.dtype().itemsize();
  return at::native::set_storage_cpu_(t, std::move(source), 0, {numel}, {});
}

using Sizes = c10::IntArrayRef;
Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, Sizes stride, Sizes padding,
                   Sizes dilation, bool transposed, Sizes output_padding, int64_t groups) {
  tell("launch", "aten::convolution", x.device().index());
  std::optional<Tensor> b = bias && bias->defined() ? std::optional(as_cpu(*bias)) : std::nullopt;
  const Tensor made = as_sim(
      at::convolution(as_cpu(x), as_cpu(w), b, stride, padding, dilation, transposed, output_padding, groups), x.device().index());
  Tensors given{x, w};
  if (b) given.push_back(*bias);
  record(given, {made}, [stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec(), transposed,
                         extra = output_padding.vec(), groups](const Tensors& t) {
    return Tensors{at::convolution(t[0], t[1], t.size() > 2 ? std::optional(t[2]) : std::nullopt, stride, padding, dilation, transposed, extra, groups)};
  });
  return made;
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& x, const Tensor& w, Sizes stride,
                                                        Sizes padding, Sizes dilation, bool transposed, Sizes output_padding,
                                                        int64_t groups, std::array<bool, 3> mask) {
  const int device = x.device().index();
  tell("launch", "aten::convolution_backward", device);
  auto [dx, dw, db] = at::convolution_backward(as_cpu(grad), as_cpu(x), as_cpu(w), {{w.size(0)}}, stride, padding, dilation,
                                               transposed, output_padding, groups, mask);
  auto up = [&](const Tensor& t) { return t.defined() ? as_sim(t, device) : t; };
  Tensors every{up(dx), up(dw), up(db)}, made;
  for (const Tensor& t : every)
    if (t.defined()) made.push_back(t);
  record({grad, x, w}, made, [bias = w.size(0), stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec(),
                              transposed, extra = output_padding.vec(), groups, mask](const Tensors& t) {
    auto [dx, dw, db] = at::convolution_backward(t[0], t[1], t[2], {{bias}}, stride, padding, dilation, transposed, extra, groups, mask);
    Tensors done;
    for (const Tensor& one : {dx, dw, db})
      if (one.defined()) done.push_back(one);
    return done;
  });
  return {every[0], every[1], every[2]};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("view", &view);
  m.impl("as_strided", &as_strided);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("_copy_from", &copy);
  m.impl("_local_scalar_dense", &read);
  // Devices have kernels of their own for these; the default is a composite that rounds elsewhere, or launches for each tensor.
  m.impl("_foreach_copy_", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("_foreach_mul.Tensor", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("_foreach_norm.Scalar", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOW)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_DTYPE)
  AT_FORALL_PROMOTE(WIDEST)
}
std::vector<Operand> operands;  // of launches that are not torch's

TORCH_LIBRARY(sim, m) {
  m.def("operand(Tensor t) -> int", [](const Tensor& t) -> int64_t {
    operands.push_back(recording->operand(t));
    return operands.size() - 1;
  });
  m.def("operand_there(int index) -> Tensor", [](int64_t index) { return operands[index].cpu(); });
  m.def("rng_state(int device) -> Tensor", [](int64_t device) { return generator(device).get_state(); });
  m.def("set_rng_state(int device, Tensor state) -> ()",
        [](int64_t device, const Tensor& state) { generator(device).set_state(state); });
}
}  // namespace

PYBIND11_MODULE(sim_device, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("observe", [](py::object f) {
    delete observer;
    observer = f.is_none() ? nullptr : new py::object(std::move(f));
  });
  m.def("land", [] {
    for (int device = 0; device < DEVICES; ++device) land(device);
  });
#ifdef HAS_GRAPHS
  at::GraphImplRegistry()->Register(
      "SIM", [](const at::GraphImplArgs& args) -> std::unique_ptr<at::GraphImplInterface> { return std::make_unique<SimGraph>(args); });
#endif
  m.def("set_late_uploads", [](bool late) { uploads_are_late = late; });
  m.def("is_capturing", [] { return recording != nullptr; });
  m.def("record", [](py::function launch) {
    auto* held = new py::function(std::move(launch));
    recording->nodes.push_back([held] {
      py::gil_scoped_acquire acquired;
      (*held)();
    });
  });
  m.def("set_fp64", [](bool has) { has_fp64 = has; });
  m.def("manual_seed", [](int device, uint64_t seed) { generator(device).set_current_seed(seed); });
}
