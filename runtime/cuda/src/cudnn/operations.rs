//! Translates plan operations to cuDNN graphs.

use super::attention;
use super::descriptor::{self as names, Api, Attribute, Descriptor, Kind, Result};
use crate::error::CudaError;
use frit_ir::DType;
use frit_ir::plan::{Direction, Operation, OperationKind, Strided};
use std::rc::Rc;

/// `cudnnConvolutionMode_t`: the filters are not flipped.
const CROSS_CORRELATION: i32 = 1;
/// `cudnnPointwiseMode_t`: only a conversion.
const IDENTITY: i32 = 21;

/// An operation graph and the descriptors that it owns. The id of tensor `i` is `i + 1`.
pub(super) struct Graph {
    /// The graph; declared first, as it is destroyed before its parts.
    pub(super) graph: Descriptor,
    _parts: Vec<Descriptor>,
    /// A scalar that the host passes by value, with its id.
    pub(super) values: Vec<(i64, f32)>,
}

/// Builder for the graph.
pub(super) struct Builder<'a> {
    pub(super) api: &'a Rc<Api>,
    pub(super) operation: &'a Operation,
    pub(super) parts: Vec<Descriptor>,
    /// Indices of the graph's nodes among the parts.
    pub(super) nodes: Vec<usize>,
    pub(super) values: Vec<(i64, f32)>,
    pub(super) n_tensors: usize,
}

/// Describes an operation to the library; `handle` is null where there is no GPU.
///
/// # Errors
/// Operations that the library does not support.
pub(super) fn graph(api: &Rc<Api>, handle: names::Raw, operation: &Operation) -> Result<Graph> {
    let n_tensors = operation.tensors.len();
    let (parts, nodes, values) = (Vec::new(), Vec::new(), Vec::new());
    let mut builder = Builder { api, operation, parts, nodes, values, n_tensors };
    match &operation.kind {
        OperationKind::Conv { direction, .. } => builder.conv(*direction)?,
        OperationKind::Attention { .. } | OperationKind::AttentionGrad { .. } => {
            attention::check(api, operation)?;
            builder.add(&attention::nodes(operation))?;
        }
        OperationKind::Pool { .. } => builder.pool()?,
        OperationKind::BatchNorm { eps_bits } => builder.batch_norm(f32::from_bits(*eps_bits))?,
        OperationKind::BatchNormGrad => builder.batch_norm_grad()?,
    }
    let mut graph = Descriptor::new(api, Kind::OperationGraph)?;
    if !handle.is_null() {
        graph.set(&names::GRAPH_HANDLE, &[handle])?;
    }
    let nodes: Vec<&Descriptor> = builder.nodes.iter().map(|n| &builder.parts[*n]).collect();
    graph.refer(&names::GRAPH_OPERATIONS, &nodes)?;
    Ok(Graph { graph: graph.finalize()?, _parts: builder.parts, values: builder.values })
}

impl Builder<'_> {
    /// Stores a part, and returns its index.
    pub(super) fn keep(&mut self, part: Descriptor) -> usize {
        self.parts.push(part);
        self.parts.len() - 1
    }

    /// One of the operation's tensors.
    pub(super) fn tensor(&mut self, index: usize) -> Result<usize> {
        let tensor = &self.operation.tensors[index];
        let made = self.describe(tensor, index + 1, None)?;
        Ok(self.keep(made))
    }

    /// An intermediate tensor with the shape of one of the operation's tensors.
    fn between(&mut self, index: usize, dtype: DType) -> Result<usize> {
        self.n_tensors += 1;
        let tensor = Strided { dtype, ..self.operation.tensors[index].clone() };
        let made = self.describe(&tensor, self.n_tensors, Some(&names::TENSOR_VIRTUAL))?;
        Ok(self.keep(made))
    }

    /// A tensor with this id; `role` marks one that is not in memory.
    pub(super) fn describe(
        &self,
        tensor: &Strided,
        id: usize,
        role: Option<&Attribute<bool>>,
    ) -> Result<Descriptor> {
        let mut made = Descriptor::new(self.api, Kind::Tensor)?;
        made.set(&names::TENSOR_TYPE, &[data_type(tensor.dtype)?])?;
        made.set(&names::TENSOR_SIZES, &signed(&tensor.sizes))?;
        made.set(&names::TENSOR_STRIDES, &signed(&tensor.strides))?;
        made.set(&names::TENSOR_ID, &[id as i64])?;
        made.set(&names::TENSOR_ALIGNMENT, &[tensor.alignment_bytes as i64])?;
        if let Some(role) = role {
            made.set(role, &[true])?;
        }
        made.finalize()
    }

    fn conv(&mut self, direction: Direction) -> Result {
        let OperationKind::Conv { strides, dilations, low, high, .. } = &self.operation.kind else {
            unreachable!("invariant: a convolution")
        };
        let wide = match self.operation.tensors[0].dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let mut convolution = Descriptor::new(self.api, Kind::Convolution)?;
        convolution.set(&names::CONVOLUTION_TYPE, &[data_type(wide)?])?;
        convolution.set(&names::CONVOLUTION_MODE, &[CROSS_CORRELATION])?;
        convolution.set(&names::CONVOLUTION_AXES, &[strides.len() as i64])?;
        convolution.set(&names::CONVOLUTION_STRIDES, &signed(strides))?;
        convolution.set(&names::CONVOLUTION_DILATIONS, &signed(dilations))?;
        convolution.set(&names::CONVOLUTION_LOW, &signed(low))?;
        convolution.set(&names::CONVOLUTION_HIGH, &signed(high))?;
        let convolution = convolution.finalize()?;
        let convolution = self.keep(convolution);

        // Engines write the operands' type; a wider result needs an identity node.
        let result = self.operation.results()[0];
        let [image, filters, response] = &self.operation.tensors[..] else {
            unreachable!("invariant: a convolution has three tensors")
        };
        let operand = if result == 0 { filters } else { image };
        let widens = [image, filters, response][result].dtype != operand.dtype;
        let mut tensors = [0; 3];
        for (i, tensor) in tensors.iter_mut().enumerate() {
            *tensor = match widens && i == result {
                true => self.between(i, wide)?,
                false => self.tensor(i)?,
            };
        }
        // Attributes of alpha, beta, the convolution, and the three tensors.
        let (kind, first, [x, w, y]) = match direction {
            Direction::Forward => (Kind::ConvolutionForward, 700, [704, 703, 705]),
            Direction::GradInput => (Kind::ConvolutionGradInput, 706, [710, 709, 711]),
            Direction::GradWeight => (Kind::ConvolutionGradWeight, 712, [716, 715, 717]),
        };
        let mut node = Descriptor::new(self.api, kind)?;
        // Attribute types: 5 is double, 4 is float.
        match wide {
            DType::F64 => {
                node.set(&Attribute::<f64>::new(first, 5), &[1.0])?;
                node.set(&Attribute::<f64>::new(first + 1, 5), &[0.0])?;
            }
            _ => {
                node.set(&Attribute::<f32>::new(first, 4), &[1.0])?;
                node.set(&Attribute::<f32>::new(first + 1, 4), &[0.0])?;
            }
        }
        for (name, part) in
            [(first + 2, convolution), (x, tensors[0]), (w, tensors[1]), (y, tensors[2])]
        {
            node.refer(&Attribute::new(name, 15), &[&self.parts[part]])?;
        }
        let node = node.finalize()?;
        let node = self.keep(node);
        self.nodes.push(node);
        match widens {
            true => self.identity(tensors[result], result),
            false => Ok(()),
        }
    }

    /// Adds a node that copies a value into one of the tensors.
    fn identity(&mut self, from: usize, to: usize) -> Result {
        let to = self.tensor(to)?;
        let mut pointwise = Descriptor::new(self.api, Kind::Pointwise)?;
        pointwise.set(&names::POINTWISE_MODE, &[IDENTITY])?;
        pointwise.set(&names::POINTWISE_PRECISION, &[data_type(DType::F32)?])?;
        let pointwise = pointwise.finalize()?;
        let mut node = Descriptor::new(self.api, Kind::PointwiseOperation)?;
        node.refer(&names::OPERATION_POINTWISE, &[&pointwise])?;
        node.refer(&names::OPERATION_POINTWISE_X, &[&self.parts[from]])?;
        node.refer(&names::OPERATION_POINTWISE_Y, &[&self.parts[to]])?;
        let node = node.finalize()?;
        self.keep(pointwise);
        let node = self.keep(node);
        self.nodes.push(node);
        Ok(())
    }
}

pub(super) fn signed(sizes: &[usize]) -> Vec<i64> {
    sizes.iter().map(|n| *n as i64).collect()
}

/// `cudnnDataType_t`.
pub(super) fn data_type(dtype: DType) -> Result<i32> {
    Ok(match dtype {
        DType::F32 => 0,
        DType::F64 => 1,
        DType::F16 => 2,
        DType::I32 => 4,
        DType::BF16 => 9,
        DType::Bool => 11,
        other => {
            let reason = format!("no cuDNN data type for {other}");
            return Err(CudaError::Call { call: "cuDNN", reason });
        }
    })
}
