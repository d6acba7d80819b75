//! Graph nodes as cuDNN descriptors.

use super::descriptor::{self as names, Attribute, Descriptor, Kind, Raw, Result};
use super::nodes::{Function, Node, Nodes, Place, Tensor};
use super::operations::{Builder, data_type};
use frit_ir::DType;

/// `cudnnReduceTensorOp_t`.
const SUM: i32 = 0;
const MAX: i32 = 3;

impl Builder<'_> {
    /// Adds all nodes to the graph.
    ///
    /// # Errors
    /// Operations that the library does not support.
    pub(super) fn add(&mut self, all: &Nodes) -> Result {
        let mut places = Vec::with_capacity(all.tensors.len());
        for tensor in &all.tensors {
            let made = self.place(tensor)?;
            places.push(self.keep(made));
        }
        for Node { function, from, to } in &all.nodes {
            let from: Vec<usize> = from.iter().map(|i| places[*i]).collect();
            let node = match function {
                Function::MatMul => self.matmul(&from, places[*to])?,
                Function::Transpose => self.reshape(&from, places[*to])?,
                Function::Sum => self.reduce(SUM, &from, places[*to])?,
                Function::Max => self.reduce(MAX, &from, places[*to])?,
                pointwise => self.pointwise(*pointwise, &from, places[*to])?,
            };
            let node = self.keep(node);
            self.nodes.push(node);
        }
        Ok(())
    }

    fn place(&mut self, tensor: &Tensor) -> Result<Descriptor> {
        let role = match tensor.place {
            Place::Memory(index) => return self.describe(&tensor.shape, index + 1, None),
            Place::Between => &names::TENSOR_VIRTUAL,
            Place::Value(_) => &names::TENSOR_BY_VALUE,
        };
        self.n_tensors += 1;
        if let Place::Value(value) = tensor.place {
            self.values.push((self.n_tensors as i64, value));
        }
        self.describe(&tensor.shape, self.n_tensors, Some(role))
    }

    fn matmul(&mut self, from: &[usize], to: usize) -> Result<Descriptor> {
        let mut matmul = Descriptor::new(self.api, Kind::MatMul)?;
        matmul.set(&names::MATMUL_TYPE, &[data_type(DType::F32)?])?;
        let operands = [&names::OPERATION_MATMUL_A, &names::OPERATION_MATMUL_B];
        let function = Some((&names::OPERATION_MATMUL, matmul));
        let result = (&names::OPERATION_MATMUL_C, to);
        self.step(Kind::MatMulOperation, function, (&operands, from), result)
    }

    fn reduce(&mut self, operator: i32, from: &[usize], to: usize) -> Result<Descriptor> {
        let mut reduction = Descriptor::new(self.api, Kind::Reduction)?;
        reduction.set(&names::REDUCTION_OPERATOR, &[operator])?;
        reduction.set(&names::REDUCTION_TYPE, &[data_type(DType::F32)?])?;
        let operands = [&names::OPERATION_REDUCTION_X];
        let function = Some((&names::OPERATION_REDUCTION, reduction));
        let result = (&names::OPERATION_REDUCTION_Y, to);
        self.step(Kind::ReductionOperation, function, (&operands, from), result)
    }

    fn reshape(&mut self, from: &[usize], to: usize) -> Result<Descriptor> {
        let operands = [&names::OPERATION_RESHAPE_X];
        let result = (&names::OPERATION_RESHAPE_Y, to);
        self.step(Kind::ReshapeOperation, None, (&operands, from), result)
    }

    fn pointwise(&mut self, function: Function, from: &[usize], to: usize) -> Result<Descriptor> {
        let mode = function.pointwise().expect("invariant: a pointwise function");
        let mut pointwise = Descriptor::new(self.api, Kind::Pointwise)?;
        pointwise.set(&names::POINTWISE_MODE, &[mode])?;
        pointwise.set(&names::POINTWISE_PRECISION, &[data_type(function.precision())?])?;
        if let Function::Index(axis) = function {
            pointwise.set(&names::POINTWISE_AXIS, &[axis as i64])?;
        }
        let operands = [
            &names::OPERATION_POINTWISE_X,
            &names::OPERATION_POINTWISE_B,
            &names::OPERATION_POINTWISE_T,
        ];
        let function = Some((&names::OPERATION_POINTWISE, pointwise));
        let result = (&names::OPERATION_POINTWISE_Y, to);
        self.step(Kind::PointwiseOperation, function, (&operands, from), result)
    }

    /// A node, with its operation, operands and result.
    fn step(
        &mut self,
        kind: Kind,
        function: Option<(&Attribute<Raw>, Descriptor)>,
        (operands, from): (&[&Attribute<Raw>], &[usize]),
        (result, to): (&Attribute<Raw>, usize),
    ) -> Result<Descriptor> {
        let mut node = Descriptor::new(self.api, kind)?;
        if let Some((attribute, function)) = function {
            let function = function.finalize()?;
            node.refer(attribute, &[&function])?;
            self.keep(function);
        }
        for (attribute, from) in operands.iter().zip(from) {
            node.refer(attribute, &[&self.parts[*from]])?;
        }
        node.refer(result, &[&self.parts[to]])?;
        node.finalize()
    }
}
