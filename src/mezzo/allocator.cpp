// Blocks for torch's CPU tensors that fit where one of their size was.
//
// torch asks glibc for aligned blocks. glibc gives a larger one and frees what lies before and behind, scraps that small
// objects then settle on, so that the next block of the same size does not fit between them (2.36; sourceware bug 14581).
// Here the block is as large from the start, and freed as one. Large ones ask for large pages.
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <limits>

namespace {

constexpr std::size_t kAlignment = 64;  // torch's own, for vectors of AVX-512 and lines of the cache
constexpr std::size_t kLarge = std::size_t{16} << 20, kPage = std::size_t{2} << 20;  // what asks for pages of 2 MB

std::uintptr_t up_to(std::uintptr_t address, std::size_t multiple) { return (address + multiple - 1) & ~(multiple - 1); }

// Asks for 2 MB pages where whole ones lie inside; a kernel that has none free or gives none out goes on with small ones.
void ask_for_large_pages(std::uintptr_t start, std::size_t bytes) {
  const std::uintptr_t first = up_to(start, kPage), last = (start + bytes) & ~(kPage - 1);
  (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

// What stands before the bytes of a tensor here: by the mark, which holds the address, a block is known as one of these.
struct Head {
  static constexpr std::uintptr_t kMark = 0x6d657a7a6f20626c;  // "mezzo bl"

  std::uintptr_t mark;
  void* start;  // as malloc gave it
};

Head* head_of(void* data) { return static_cast<Head*>(data) - 1; }

bool is_ours(void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data), start = reinterpret_cast<std::uintptr_t>(head_of(data)->start);
  return head_of(data)->mark == (Head::kMark ^ address) && start < address && address - start <= kAlignment;
}

// oneDNN frees a block by the allocator of that moment, whichever made it: both kinds are told apart.
void release(void* data) {
  if (data == nullptr) return;
  if (!is_ours(data)) return c10::GetDefaultCPUAllocator()->raw_deallocate(data);
  c10::profiledCPUMemoryReporter().Delete(data);
  head_of(data)->mark = 0;
  std::free(head_of(data)->start);
}

class Allocator final : public c10::Allocator {
 public:
  std::atomic<bool> fits{false};  // or blocks are made as torch's own are

  c10::DataPtr allocate(std::size_t bytes) override {
    if (!fits) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    void* data = bytes == 0 ? nullptr : block(bytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

 private:
  static void* block(std::size_t bytes) {
    constexpr std::size_t kMost = std::numeric_limits<std::ptrdiff_t>::max() - kAlignment;
    void* start = bytes > kMost ? nullptr : std::malloc(bytes + kAlignment);  // a multiple of 16: 16 to 64 lie before the tensor
    if (start == nullptr) c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
    TORCH_CHECK(start != nullptr, "DefaultCPUAllocator: can't allocate memory: you tried to allocate ", bytes, " bytes.");
    const std::uintptr_t address = up_to(reinterpret_cast<std::uintptr_t>(start) + sizeof(Head), kAlignment);
    if (bytes >= kLarge) ask_for_large_pages(address, bytes);
    void* data = reinterpret_cast<void*>(address);
    *head_of(data) = {Head::kMark ^ address, start};
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return data;
  }
};

Allocator& allocator = *new Allocator;  // never destroyed: tensors are made until the process is gone

}  // namespace

// Has torch take these blocks from now on, or its own again; returns 0 where it has another allocator than its own.
// Once it has this one it keeps it, for the sake of blocks that are there.
extern "C" int mezzo_allocator_fit(int on) {
  if (c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator()) c10::SetCPUAllocator(&allocator);
  const bool is_taken = c10::GetCPUAllocator() == &allocator;
  allocator.fits = on && is_taken;
  return is_taken;
}
