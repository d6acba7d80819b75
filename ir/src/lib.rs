//! The intermediate representation of Frit: the graph, its text form and invariants, and the plan.
//!
//! This crate does not depend on any other crate of the workspace and knows nothing of ONNX, CUDA or passes.

#![forbid(unsafe_code)]

mod choices;
pub mod codes;
pub mod diagnostic;
pub mod dtype;
pub mod graph;
mod ids;
pub mod interpret;
pub mod nearest;
pub mod ops;
pub mod origin;
pub mod pattern;
pub mod plan;
pub mod shape;
pub mod sharding;
pub mod strided;
pub mod tensor;
pub mod text;
pub mod verify;

pub use codes::Code;
pub use diagnostic::{Diagnostic, Severity, counted};
pub use dtype::DType;
pub use graph::{Graph, GraphError, Node, NodeId, Output, OutputKind, Value, ValueId};
pub use ops::{Op, OpError};
pub use origin::{Origin, Region};
pub use shape::{Shape, TensorType};
pub use tensor::{Tensor, TensorData};
