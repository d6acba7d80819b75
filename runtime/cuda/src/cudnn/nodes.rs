//! Graphs of matmuls, pointwise functions and reductions, independent of cuDNN's descriptors.

use frit_ir::DType;
use frit_ir::plan::Strided;

/// A graph: tensors, and the nodes that compute them in topological order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Nodes {
    /// Operands, results, and intermediate tensors.
    pub tensors: Vec<Tensor>,
    /// The nodes.
    pub nodes: Vec<Node>,
}

/// A tensor of a graph, of four axes.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its type, sizes and strides.
    pub shape: Strided,
    /// Where its elements are stored.
    pub place: Place,
}

/// Where a tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Place {
    /// In memory, as the operation's tensor of this index.
    Memory(usize),
    /// Nowhere: an intermediate tensor, read only by other nodes.
    Between,
    /// A scalar that the host passes.
    Value(f32),
}

/// One node.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Its function.
    pub function: Function,
    /// Indices of its operands.
    pub from: Vec<usize>,
    /// Index of its result.
    pub to: usize,
}

/// The operation of a node, in f32 unless noted. Axes of one element broadcast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// Matmul over the last two axes; heads of the first share those of the second where it has fewer.
    MatMul,
    /// The same elements with other sizes and strides: element `i`, `j` of the last two axes is `j`, `i`.
    Transpose,
    /// The sum over the axes where the result has fewer elements: all, or groups of neighbors.
    Sum,
    /// The maximum over the axes where the result has one element.
    Max,
    /// a + b.
    Add,
    /// a · b.
    Mul,
    /// a / b.
    Div,
    /// a − b.
    Sub,
    /// eᵃ.
    Exp,
    /// The natural logarithm.
    Log,
    /// a, rounded to the result's type.
    Identity,
    /// Whether a ≥ b.
    AtLeast,
    /// The index along this axis, an i32.
    Index(usize),
    /// a where c is true, otherwise b.
    Select,
}

impl Function {
    /// The value of `cudnnPointwiseMode_t` for a pointwise function.
    pub(super) fn pointwise(self) -> Option<i32> {
        Some(match self {
            Function::Add => 0,
            Function::Mul => 1,
            Function::Div => 6,
            Function::Sub => 9,
            Function::Exp => 13,
            Function::Log => 15,
            Function::Identity => 21,
            Function::AtLeast => 303,
            Function::Index(_) => 501,
            Function::Select => 601,
            Function::MatMul | Function::Transpose | Function::Sum | Function::Max => return None,
        })
    }

    /// Its compute dtype.
    pub(super) fn precision(self) -> DType {
        match self {
            Function::AtLeast => DType::Bool,
            Function::Index(_) => DType::I32,
            _ => DType::F32,
        }
    }
}

impl Nodes {
    /// A tensor in memory.
    pub(super) fn memory(&mut self, index: usize, shape: Strided) -> usize {
        self.tensor(shape, Place::Memory(index))
    }

    /// A scalar that the host passes.
    pub(super) fn value(&mut self, value: f32) -> usize {
        self.tensor(Strided::dense(DType::F32, &[1; 4]), Place::Value(value))
    }

    /// The result of a function, as a virtual tensor.
    pub(super) fn make(&mut self, function: Function, from: &[usize], shape: &Strided) -> usize {
        let to = self.tensor(shape.clone(), Place::Between);
        self.write(function, from, to);
        to
    }

    /// The result of a function, as a tensor in memory.
    pub(super) fn write(&mut self, function: Function, from: &[usize], to: usize) {
        self.nodes.push(Node { function, from: from.into(), to });
    }

    fn tensor(&mut self, shape: Strided, place: Place) -> usize {
        self.tensors.push(Tensor { shape, place });
        self.tensors.len() - 1
    }
}
