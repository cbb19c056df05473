// A CUDA device guard that does nothing. FakeTensorMode sets one by itself, but in CUDA builds only.
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
struct NothingToGuard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getNewStream(Device, int) const override { return getStream(getDevice()); }
  Stream exchangeStream(Stream) const noexcept override { return getStream(getDevice()); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
};
namespace { C10_REGISTER_GUARD_IMPL(CUDA, NothingToGuard) }
