// A CUDA device that does nothing, for the CPU build of torch: fake tensors of type "cuda" need a device guard
// (streams, events, the current device) and the hooks of the type, but no arithmetic and no memory.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <string>

namespace {

constexpr c10::DeviceIndex kDevices = 8;

c10::DeviceIndex& current() {
  static thread_local c10::DeviceIndex index = 0;
  return index;
}

c10::Device device(c10::DeviceIndex index) {
  return {c10::DeviceType::CUDA, index < 0 ? current() : index};
}

c10::Stream stream(c10::Device of) {
  return c10::Stream(c10::Stream::DEFAULT, device(of.index()));
}

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override {
    return device(current());
  }
  void setDevice(c10::Device to) const override {
    current() = device(to.index()).index();
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    current() = device(to.index()).index();
  }
  c10::Device exchangeDevice(c10::Device to) const override {
    const auto before = getDevice();
    setDevice(to);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }

  c10::Stream getStream(c10::Device of) const noexcept override {
    return stream(of);
  }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return stream(of);
  }
  c10::Stream getNewStream(c10::Device of, int) const override {
    return stream(of);
  }
  c10::Stream exchangeStream(c10::Stream to) const noexcept override {
    return stream(to.device());
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    static int recorded;
    *event = &recorded;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override {
    return 1.0;
  }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

const c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::CUDA, new Guard);

} // namespace

namespace at {

// torch looks the hooks up by this class name.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasCUDA() const override {
    return true;
  }
  bool hasCuDNN() const override {
    return false;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return kDevices;
  }
  DeviceIndex getCurrentDevice() const override {
    return current();
  }
  std::string showConfig() const override {
    return "no CUDA";
  }
};

REGISTER_CUDA_HOOKS(CUDAHooks);

} // namespace at
