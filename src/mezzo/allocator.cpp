// Blocks for torch's CPU tensors that fit where one of their size was.
//
// torch asks glibc for aligned blocks. glibc gives a larger one and frees what lies before and behind, scraps that small
// objects then settle on, so that the next block of the same size does not fit between them (2.36; sourceware bug 14581).
// Here the block is as large from the start, and freed as one.
#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <cstdlib>
#include <limits>

namespace {

constexpr std::size_t kAlignment = 64;  // torch's own, for vectors of AVX-512 and lines of the cache

void release(void* data) {
  if (data == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  std::free(static_cast<void**>(data)[-1]);
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void** data = bytes == 0 ? nullptr : block(bytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

 private:
  // Returns where the tensor's bytes begin; the address that malloc gave stands before it.
  static void** block(std::size_t bytes) {
    constexpr std::size_t kMost = std::numeric_limits<std::ptrdiff_t>::max() - kAlignment;
    void* start = bytes > kMost ? nullptr : std::malloc(bytes + kAlignment);  // which is a multiple of 16, so 16 to 64 are left
    if (start == nullptr) c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
    TORCH_CHECK(start != nullptr, "DefaultCPUAllocator: can't allocate memory: you tried to allocate ", bytes, " bytes.");
    auto** data = reinterpret_cast<void**>((reinterpret_cast<std::uintptr_t>(start) + kAlignment) & ~(kAlignment - 1));
    data[-1] = start;
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return data;
  }
};

Allocator& allocator = *new Allocator;  // never destroyed: tensors are made until the process is gone

}  // namespace

// Gives torch these blocks, unless it has another allocator than its own; returns whether it takes them now.
extern "C" int mezzo_allocator_install() {
  if (c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator()) c10::SetCPUAllocator(&allocator);
  return c10::GetCPUAllocator() == &allocator;
}

// Gives torch its own back; blocks that are taken are freed as they were made.
extern "C" void mezzo_allocator_remove() {
  if (c10::GetCPUAllocator() == &allocator) c10::SetCPUAllocator(c10::GetDefaultCPUAllocator());
}
