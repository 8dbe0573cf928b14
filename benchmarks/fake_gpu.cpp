// What torch lacks without a GPU to follow tensors on "cuda" that have no memory: a device that is there, and its one stream.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
struct CUDAHooks : CUDAHooksInterface {  // torch asks its registry for this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
};
// Before those of a torch built for CUDA, which would ask the driver.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)
}  // namespace at

namespace {
using namespace c10;
const Device gpu(DeviceType::CUDA, 0);
const Stream stream(Stream::DEFAULT, gpu);

struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return gpu; }
  Device getDevice() const override { return gpu; }
  Stream getStream(Device) const noexcept override { return stream; }
  Stream exchangeStream(Stream) const noexcept override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};
}  // namespace

extern "C" void take_guard() { static const impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, new Guard); }  // the last one holds
