//! What a run leaves behind: its directory, TensorBoard events, JSON and pictures. Every failure is
//! an error; none is a panic.

mod collapse;
mod diagnosis;
mod directory;
mod events;
mod filter;
mod picture;
mod report;
mod study;
mod training;

pub use collapse::{Heatmap, Plane};
pub use diagnosis::DiagnosisLog;
pub use directory::RunDirectory;
pub use events::EventWriter;
pub use filter::{FilterLog, score_by_rank};
pub use picture::{Mark, Picture, Scatter};
pub use report::{number, page, with_error};
pub use study::StudyLog;
pub use training::{TrainLog, TrainingDirectory};
