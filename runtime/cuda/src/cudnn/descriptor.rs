//! Backend descriptors of cuDNN's graph interface: created, given attributes, finalized, then queried. Constants are those
//! of `cudnn_graph.h`, version 9.

use super::super::error::CudaError;
use super::super::library::functions;
use super::super::nvrtc::c_text;
use std::ffi::{c_char, c_void};
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::rc::Rc;

functions! {
    /// The library's functions.
    Api {
        cudnnGetVersion: fn() -> usize,
        cudnnGetErrorString: fn(u32) -> *const c_char,
        cudnnGetLastErrorString: fn(*mut c_char, usize) -> (),
        cudnnCreate: fn(*mut *mut c_void) -> u32,
        cudnnSetStream: fn(*mut c_void, *mut c_void) -> u32,
        cudnnBackendCreateDescriptor: fn(u32, *mut *mut c_void) -> u32,
        cudnnBackendDestroyDescriptor: fn(*mut c_void) -> u32,
        cudnnBackendFinalize: fn(*mut c_void) -> u32,
        cudnnBackendSetAttribute: fn(*mut c_void, u32, u32, i64, *const c_void) -> u32,
        cudnnBackendGetAttribute: fn(*mut c_void, u32, u32, i64, *mut i64, *mut c_void) -> u32,
        cudnnBackendExecute: fn(*mut c_void, *mut c_void, *mut c_void) -> u32,
    }
}

pub(super) type Result<T = ()> = std::result::Result<T, CudaError>;

impl Api {
    /// The library's functions.
    pub(super) fn load(
        loaded: &super::super::library::Loaded,
    ) -> std::result::Result<Api, super::super::library::LibraryError> {
        Api::of(loaded)
    }

    /// A failure with the library's message.
    pub(super) fn check(&self, call: &'static str, code: u32) -> Result {
        if code == 0 {
            return Ok(());
        }
        let mut detail = [0_u8; 512];
        // SAFETY: the text lives as long as the library, and the buffer has the size said.
        let (status, detail) = unsafe {
            (self.cudnnGetLastErrorString)(detail.as_mut_ptr().cast(), detail.len());
            (c_text((self.cudnnGetErrorString)(code)), c_text(detail.as_ptr().cast()))
        };
        let separator = if detail.is_empty() { "" } else { ": " };
        Err(CudaError::Call { call, reason: format!("{status}{separator}{detail}") })
    }
}

/// Kind of descriptor (`cudnnBackendDescriptorType_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Kind {
    Pointwise = 0,
    Convolution = 1,
    Engine = 2,
    EngineConfiguration = 3,
    Heuristics = 4,
    ExecutionPlan = 5,
    KnobChoice = 7,
    ConvolutionForward = 10,
    ConvolutionGradWeight = 11,
    ConvolutionGradInput = 12,
    PointwiseOperation = 13,
    OperationGraph = 15,
    VariantPack = 16,
    Tensor = 17,
    MatMul = 18,
    MatMulOperation = 19,
    Reduction = 21,
    ReductionOperation = 22,
    Resample = 24,
    ResampleForward = 25,
    ResampleGrad = 26,
    NormForward = 29,
    NormGrad = 30,
    ReshapeOperation = 31,
    DeviceProperties = 38,
}

/// An attribute, by its number (`cudnnBackendAttributeName_t`) and the number of its elements' type
/// (`cudnnBackendAttributeType_t`), which is `T` in memory.
pub(super) struct Attribute<T> {
    name: u32,
    ty: u32,
    elements: PhantomData<T>,
}

/// A pointer to a descriptor, a handle, or memory.
pub(super) type Raw = *mut c_void;

macro_rules! attributes {
    ($($name:ident: $element:ty = $number:literal, $ty:literal;)*) => {
        $(pub(super) const $name: Attribute<$element> = Attribute::new($number, $ty);)*
    };
}

impl<T> Attribute<T> {
    pub(super) const fn new(name: u32, ty: u32) -> Attribute<T> {
        Attribute { name, ty, elements: PhantomData }
    }
}

attributes! {
    POINTWISE_MODE: i32 = 0, 14;
    POINTWISE_PRECISION: i32 = 1, 1;
    POINTWISE_AXIS: i64 = 9, 3;
    CONVOLUTION_TYPE: i32 = 100, 1;
    CONVOLUTION_MODE: i32 = 101, 7;
    CONVOLUTION_DILATIONS: i64 = 102, 3;
    CONVOLUTION_STRIDES: i64 = 103, 3;
    CONVOLUTION_HIGH: i64 = 104, 3;
    CONVOLUTION_LOW: i64 = 105, 3;
    CONVOLUTION_AXES: i64 = 106, 3;
    HEURISTICS_MODE: i32 = 200, 8;
    HEURISTICS_GRAPH: Raw = 201, 15;
    HEURISTICS_RESULTS: Raw = 202, 15;
    HEURISTICS_DEVICE: Raw = 204, 15;
    CONFIGURATION_ENGINE: Raw = 300, 15;
    CONFIGURATION_KNOBS: Raw = 302, 15;
    CONFIGURATION_WORKSPACE: i64 = 303, 3;
    PLAN_HANDLE: Raw = 400, 0;
    PLAN_CONFIGURATION: Raw = 401, 15;
    PLAN_WORKSPACE: i64 = 402, 3;
    PLAN_DEVICE: Raw = 407, 15;
    KNOB_TYPE: i32 = 600, 9;
    KNOB_VALUE: i64 = 601, 3;
    OPERATION_POINTWISE: Raw = 750, 15;
    OPERATION_POINTWISE_X: Raw = 751, 15;
    OPERATION_POINTWISE_B: Raw = 752, 15;
    OPERATION_POINTWISE_Y: Raw = 753, 15;
    OPERATION_POINTWISE_T: Raw = 758, 15;
    GRAPH_HANDLE: Raw = 800, 0;
    GRAPH_OPERATIONS: Raw = 801, 15;
    TENSOR_ALIGNMENT: i64 = 900, 3;
    TENSOR_TYPE: i32 = 901, 1;
    TENSOR_SIZES: i64 = 902, 3;
    TENSOR_STRIDES: i64 = 903, 3;
    TENSOR_ID: i64 = 906, 3;
    TENSOR_VIRTUAL: bool = 907, 2;
    TENSOR_BY_VALUE: bool = 908, 2;
    PACK_IDS: i64 = 1000, 3;
    PACK_POINTERS: Raw = 1001, 6;
    PACK_WORKSPACE: Raw = 1003, 6;
    ENGINE_GRAPH: Raw = 1300, 15;
    ENGINE_INDEX: i64 = 1301, 3;
    ENGINE_NUMERICAL_NOTES: i32 = 1303, 11;
    ENGINE_BEHAVIOR_NOTES: i32 = 1305, 19;
    ENGINE_DEVICE: Raw = 1307, 15;
    MATMUL_TYPE: i32 = 1500, 1;
    OPERATION_MATMUL_A: Raw = 1520, 15;
    OPERATION_MATMUL_B: Raw = 1521, 15;
    OPERATION_MATMUL_C: Raw = 1522, 15;
    OPERATION_MATMUL: Raw = 1523, 15;
    REDUCTION_OPERATOR: i32 = 1600, 18;
    REDUCTION_TYPE: i32 = 1601, 1;
    OPERATION_REDUCTION_X: Raw = 1610, 15;
    OPERATION_REDUCTION_Y: Raw = 1611, 15;
    OPERATION_REDUCTION: Raw = 1612, 15;
    RESAMPLE_MODE: i32 = 1700, 21;
    RESAMPLE_TYPE: i32 = 1701, 1;
    RESAMPLE_AXES: i64 = 1702, 3;
    RESAMPLE_HIGH: i64 = 1703, 3;
    RESAMPLE_LOW: i64 = 1704, 3;
    RESAMPLE_STRIDES: i64 = 1705, 3;
    RESAMPLE_TAPS: i64 = 1706, 3;
    RESAMPLE_NAN: i32 = 1707, 10;
    RESAMPLE_BORDER: i32 = 1708, 22;
    NORM_MODE: i32 = 2000, 27;
    NORM_PHASE: i32 = 2001, 28;
    NORM_GRAD_MODE: i32 = 2100, 27;
    OPERATION_RESHAPE_X: Raw = 2200, 15;
    OPERATION_RESHAPE_Y: Raw = 2201, 15;
    DEVICE_JSON: u8 = 2702, 24;
}

/// A descriptor, destroyed on drop.
pub(super) struct Descriptor {
    api: Rc<Api>,
    raw: Raw,
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: it was created, and is used no more.
        unsafe { (self.api.cudnnBackendDestroyDescriptor)(self.raw) };
    }
}

impl Descriptor {
    /// Creates an empty descriptor.
    ///
    /// # Errors
    /// If the library does not know the kind.
    pub(super) fn new(api: &Rc<Api>, kind: Kind) -> Result<Descriptor> {
        let mut raw = null_mut();
        // SAFETY: the pointer is valid.
        let code = unsafe { (api.cudnnBackendCreateDescriptor)(kind as u32, &mut raw) };
        api.check("cudnnBackendCreateDescriptor", code)?;
        Ok(Descriptor { api: Rc::clone(api), raw })
    }

    /// Sets an attribute.
    ///
    /// # Errors
    /// If the library refuses it.
    pub(super) fn set<T: Copy>(&mut self, attribute: &Attribute<T>, values: &[T]) -> Result {
        let at = values.as_ptr().cast();
        let Attribute { name, ty, .. } = *attribute;
        // SAFETY: there are as many elements as said, of the attribute's type.
        let code = unsafe {
            (self.api.cudnnBackendSetAttribute)(self.raw, name, ty, values.len() as i64, at)
        };
        self.api.check("cudnnBackendSetAttribute", code)
    }

    /// Sets an attribute to other descriptors, which must live as long as this one.
    ///
    /// # Errors
    /// As [`Descriptor::set`].
    pub(super) fn refer(&mut self, attribute: &Attribute<Raw>, to: &[&Descriptor]) -> Result {
        let raw: Vec<Raw> = to.iter().map(|d| d.raw).collect();
        self.set(attribute, &raw)
    }

    /// Finalizes it: afterwards it can be queried but not changed.
    ///
    /// # Errors
    /// Unsupported or invalid operations.
    pub(super) fn finalize(self) -> Result<Descriptor> {
        // SAFETY: it was created.
        let code = unsafe { (self.api.cudnnBackendFinalize)(self.raw) };
        self.api.check("cudnnBackendFinalize", code).map(|()| self)
    }

    /// At most `most` elements of an attribute.
    ///
    /// # Errors
    /// If the library has no such attribute.
    pub(super) fn get<T: Copy + Default>(
        &self,
        attribute: &Attribute<T>,
        most: usize,
    ) -> Result<Vec<T>> {
        let mut values = vec![T::default(); most];
        let n = self.read(attribute, most, values.as_mut_ptr().cast())?;
        values.truncate(n);
        Ok(values)
    }

    /// At most `most` descriptors of an attribute.
    ///
    /// # Errors
    /// As [`Descriptor::get`].
    pub(super) fn get_all(
        &self,
        attribute: &Attribute<Raw>,
        kind: Kind,
        most: usize,
    ) -> Result<Vec<Descriptor>> {
        let found = self.read(attribute, 0, null_mut())?;
        let n = if found == 0 { most } else { found.min(most) };
        // The library fills existing descriptors.
        let mut all: Vec<Descriptor> =
            (0..n).map(|_| Descriptor::new(&self.api, kind)).collect::<Result<_>>()?;
        let mut raw: Vec<Raw> = all.iter().map(|d| d.raw).collect();
        let n = self.read(attribute, n, raw.as_mut_ptr().cast())?;
        all.truncate(n);
        Ok(all)
    }

    /// Reads elements of an attribute; returns their number, at most `most` unless that is 0.
    fn read<T>(&self, attribute: &Attribute<T>, most: usize, to: *mut c_void) -> Result<usize> {
        let Attribute { name, ty, .. } = *attribute;
        let mut n = 0;
        // SAFETY: there is room for as many elements as said, of the attribute's type.
        let code = unsafe {
            let most = most as i64;
            (self.api.cudnnBackendGetAttribute)(self.raw, name, ty, most, &mut n, to)
        };
        self.api.check("cudnnBackendGetAttribute", code)?;
        let n = usize::try_from(n).unwrap_or(0);
        Ok(if most == 0 { n } else { n.min(most) })
    }

    /// Runs this execution plan.
    ///
    /// # Safety
    /// The addresses of the pack must be valid when it runs.
    ///
    /// # Errors
    /// If the library refuses.
    pub(super) unsafe fn execute(&self, handle: Raw, pack: &Descriptor) -> Result {
        // SAFETY: by the contract of this function.
        let code = unsafe { (self.api.cudnnBackendExecute)(handle, self.raw, pack.raw) };
        self.api.check("cudnnBackendExecute", code)
    }
}
