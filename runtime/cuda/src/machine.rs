//! libcuda and its devices, before a device is selected.

use super::driver::Properties;
use super::error::CudaError;
use super::library::{Wanted, functions};
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction,
    CUfunction_attribute, CUgraph, CUgraphExec, CUjit_option, CUmodule, CUstream,
    CUstreamCaptureMode,
};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::null;

/// The driver's library.
pub(super) const LIBCUDA: Wanted = Wanted {
    what: "the NVIDIA driver",
    names: &["libcuda.so.1", "libcuda.so"],
    companion: None,
    remedy: "install driver 525 or later, or compile the plan with target.device = \"cpu\"",
};

/// The oldest CUDA version whose drivers run the plans' PTX.
const OLDEST: (u32, u32) = (12, 0);
/// Errors of kernels, which any later call may return.
const OF_KERNELS: [u32; 10] = [214, 700, 702, 710, 714, 715, 716, 717, 718, 719];

functions! {
    /// The driver's functions.
    Api {
        cuInit: fn(c_uint) -> u32,
        cuDriverGetVersion: fn(*mut c_int) -> u32,
        cuGetErrorName: fn(u32, *mut *const c_char) -> u32,
        cuGetErrorString: fn(u32, *mut *const c_char) -> u32,
        cuDeviceGetCount: fn(*mut c_int) -> u32,
        cuDeviceGet: fn(*mut CUdevice, c_int) -> u32,
        cuDeviceGetName: fn(*mut c_char, c_int, CUdevice) -> u32,
        cuDeviceGetAttribute: fn(*mut c_int, CUdevice_attribute, CUdevice) -> u32,
        cuDeviceTotalMem_v2: fn(*mut usize, CUdevice) -> u32,
        cuDevicePrimaryCtxRetain: fn(*mut CUcontext, CUdevice) -> u32,
        cuCtxSetCurrent: fn(CUcontext) -> u32,
        cuMemGetInfo_v2: fn(*mut usize, *mut usize) -> u32,
        cuMemAlloc_v2: fn(*mut CUdeviceptr, usize) -> u32,
        cuMemFree_v2: fn(CUdeviceptr) -> u32,
        cuMemHostAlloc: fn(*mut *mut c_void, usize, c_uint) -> u32,
        cuMemcpyHtoDAsync_v2: fn(CUdeviceptr, *const c_void, usize, CUstream) -> u32,
        cuMemcpyDtoHAsync_v2: fn(*mut c_void, CUdeviceptr, usize, CUstream) -> u32,
        cuMemcpyDtoDAsync_v2: fn(CUdeviceptr, CUdeviceptr, usize, CUstream) -> u32,
        cuMemsetD8Async: fn(CUdeviceptr, u8, usize, CUstream) -> u32,
        cuCtxGetStreamPriorityRange: fn(*mut c_int, *mut c_int) -> u32,
        cuStreamCreateWithPriority: fn(*mut CUstream, c_uint, c_int) -> u32,
        cuStreamWaitEvent: fn(CUstream, CUevent, c_uint) -> u32,
        cuEventCreate: fn(*mut CUevent, c_uint) -> u32,
        cuEventRecord: fn(CUevent, CUstream) -> u32,
        cuEventQuery: fn(CUevent) -> u32,
        cuEventElapsedTime: fn(*mut f32, CUevent, CUevent) -> u32,
        cuModuleLoadDataEx: fn(*mut CUmodule, *const c_void, c_uint, *mut CUjit_option, *mut *mut c_void) -> u32,
        cuModuleGetFunction: fn(*mut CUfunction, CUmodule, *const c_char) -> u32,
        cuFuncSetAttribute: fn(CUfunction, CUfunction_attribute, c_int) -> u32,
        cuOccupancyMaxActiveBlocksPerMultiprocessor: fn(*mut c_int, CUfunction, c_int, usize) -> u32,
        cuLaunchKernel: fn(CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void) -> u32,
        cuStreamBeginCapture_v2: fn(CUstream, CUstreamCaptureMode) -> u32,
        cuStreamEndCapture: fn(CUstream, *mut CUgraph) -> u32,
        cuGraphInstantiateWithFlags: fn(*mut CUgraphExec, CUgraph, u64) -> u32,
        cuGraphDestroy: fn(CUgraph) -> u32,
        cuGraphExecDestroy: fn(CUgraphExec) -> u32,
        cuGraphUpload: fn(CUgraphExec, CUstream) -> u32,
        cuGraphLaunch: fn(CUgraphExec, CUstream) -> u32,
    }
}

type Result<T = ()> = std::result::Result<T, CudaError>;

/// The driver, before a device is selected: it can list devices.
pub struct Machine {
    pub(super) api: Api,
    /// Where the driver's library is.
    pub path: String,
    /// The newest CUDA version that it supports.
    pub version: (u32, u32),
}

impl Machine {
    /// Loads the driver.
    ///
    /// # Errors
    /// If it is missing, too old, or refuses.
    pub fn open() -> Result<Machine> {
        let loaded = LIBCUDA.load()?;
        let (api, path) = (Api::of(&loaded)?, loaded.path);
        let mut number: c_int = 0;
        // SAFETY: the pointer is valid; this may be called before anything else.
        let version = match unsafe { (api.cuDriverGetVersion)(&mut number) } {
            0 => (number as u32 / 1000, number as u32 % 1000 / 10),
            code => return Err(api.error("cuDriverGetVersion", code)),
        };
        if version < OLDEST {
            return Err(CudaError::DriverTooOld { found: version });
        }
        let machine = Machine { api, path, version };
        // SAFETY: no arguments to get wrong.
        machine.check("cuInit", unsafe { (machine.api.cuInit)(0) })?;
        Ok(machine)
    }

    /// Number of devices.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn n_devices(&self) -> Result<usize> {
        let mut n: c_int = 0;
        // SAFETY: the pointer is valid.
        self.check("cuDeviceGetCount", unsafe { (self.api.cuDeviceGetCount)(&mut n) })?;
        Ok(n as usize)
    }

    /// Properties of a device.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn properties(&self, ordinal: usize) -> Result<Properties> {
        let device = self.device(ordinal)?;
        let mut name = [0_u8; 256];
        let mut memory_bytes = 0;
        // SAFETY: the pointers are valid, and the name has room for its size.
        let (named, sized) = unsafe {
            let name = name.as_mut_ptr().cast();
            (
                (self.api.cuDeviceGetName)(name, 255, device),
                (self.api.cuDeviceTotalMem_v2)(&mut memory_bytes, device),
            )
        };
        self.check("cuDeviceGetName", named)?;
        self.check("cuDeviceTotalMem", sized)?;
        use CUdevice_attribute as A;
        let attribute = |attribute| -> Result<u32> {
            let mut value: c_int = 0;
            // SAFETY: the pointer is valid.
            let code = unsafe { (self.api.cuDeviceGetAttribute)(&mut value, attribute, device) };
            self.check("cuDeviceGetAttribute", code)?;
            Ok(value as u32)
        };
        let name = CStr::from_bytes_until_nul(&name).map(|n| n.to_string_lossy().into_owned());
        Ok(Properties {
            name: name.unwrap_or_default(),
            capability: (
                attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            memory_bytes,
            driver_version: self.version,
            libraries: String::new(),
        })
    }

    pub(super) fn device(&self, ordinal: usize) -> Result<CUdevice> {
        let found = self.n_devices()?;
        if ordinal >= found {
            return Err(CudaError::NoDevice { wanted: ordinal, found });
        }
        let mut device: CUdevice = 0;
        // SAFETY: the pointer is valid.
        let code = unsafe { (self.api.cuDeviceGet)(&mut device, ordinal as c_int) };
        self.check("cuDeviceGet", code)?;
        Ok(device)
    }

    pub(super) fn check(&self, call: &'static str, code: u32) -> Result {
        if code == 0 { Ok(()) } else { Err(self.api.error(call, code)) }
    }
}

impl Api {
    fn error(&self, call: &'static str, code: u32) -> CudaError {
        let text = |get: unsafe extern "C" fn(u32, *mut *const c_char) -> u32| {
            let mut text = null();
            // SAFETY: the pointer is valid; the text it is set to lives as long as the library.
            unsafe {
                match get(code, &mut text) {
                    0 if !text.is_null() => CStr::from_ptr(text).to_string_lossy().into_owned(),
                    _ => format!("error {code}"),
                }
            }
        };
        let reason = format!("{} ({})", text(self.cuGetErrorString), text(self.cuGetErrorName));
        let of_kernel = OF_KERNELS.contains(&code);
        CudaError::Call { call: if of_kernel { "a kernel launched before" } else { call }, reason }
    }
}
