//! The section of the environment.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::env::{
    Arms, Bandit, Comparison, Countdown, Environment, FrozenLake, Generator, Lake, LakeSource,
    Questions, Rules, Solvable, View,
};
use crate::error::{Error, Result};

/// An environment, told by its `name`; the other keys are its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum EnvironmentConfig {
    /// [`Bandit`].
    Bandit(BanditConfig),
    /// [`FrozenLake`].
    FrozenLake(FrozenLakeConfig),
    /// [`Countdown`].
    Countdown(CountdownConfig),
    /// [`Questions`].
    Questions(QuestionsConfig),
}

impl EnvironmentConfig {
    /// What holds in every environment.
    pub fn rules(&self) -> &Rules {
        match self {
            Self::Bandit(config) => &config.rules,
            Self::FrozenLake(config) => &config.rules,
            Self::Countdown(config) => &config.rules,
            Self::Questions(config) => &config.rules,
        }
    }

    /// The file of tasks, if it names one.
    pub fn tasks_file(&self) -> Option<&Path> {
        match self {
            Self::Countdown(CountdownConfig { tasks: CountdownTasks::File(path), .. })
            | Self::Questions(QuestionsConfig { path, .. }) => Some(path),
            _ => None,
        }
    }

    pub(super) fn tasks_file_mut(&mut self) -> Option<&mut PathBuf> {
        match self {
            Self::Countdown(CountdownConfig { tasks: CountdownTasks::File(path), .. })
            | Self::Questions(QuestionsConfig { path, .. }) => Some(path),
            _ => None,
        }
    }

    /// The environment, ready to be forked.
    ///
    /// # Errors
    /// If a value, one of its rules too, cannot be, or a file of tasks cannot be read.
    pub fn environment(&self) -> Result<Box<dyn Environment>> {
        let environment: Result<Box<dyn Environment>> = match self {
            Self::Bandit(config) => config.environment().map(|it| Box::new(it) as _),
            Self::FrozenLake(config) => config.environment().map(|it| Box::new(it) as _),
            Self::Countdown(config) => config.environment().map(|it| Box::new(it) as _),
            Self::Questions(config) => config.environment().map(|it| Box::new(it) as _),
        };
        let checked = environment.and_then(|environment| {
            self.rules().check(environment.name())?;
            Ok(environment)
        });
        checked.map_err(|error| match error {
            Error::Environment { problem, .. } => Error::config("environment", problem),
            other => other,
        })
    }
}

/// The bandit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BanditConfig {
    /// Pairs of names, of which the task draws one.
    pub arms: Vec<Arms>,
    /// What the low arm pays.
    pub low_reward: f64,
    /// What the high arm pays when it pays.
    pub high_reward: f64,
    /// How often it does.
    pub high_probability: f64,
    /// What holds in every environment.
    pub rules: Rules,
}

impl Default for BanditConfig {
    fn default() -> Self {
        Self {
            arms: vec![Arms { low: "Phoenix".into(), high: "Dragon".into() }],
            low_reward: 0.1,
            high_reward: 1.0,
            high_probability: 0.25,
            rules: Rules::default(),
        }
    }
}

impl BanditConfig {
    /// The environment.
    ///
    /// # Errors
    /// As [`Bandit::new`].
    pub fn environment(&self) -> Result<Bandit> {
        Bandit::new(self.arms.clone(), self.low_reward, self.high_reward, self.high_probability)
    }
}

/// The frozen lake.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FrozenLakeConfig {
    /// The board.
    pub map: MapConfig,
    /// The probability that a move goes to a side; 2/3 is gymnasium's slippery ice.
    pub slip: f64,
    /// How the board is shown.
    pub view: View,
    /// What holds in every environment.
    pub rules: Rules,
}

/// A board, or the law that boards are drawn from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "expected {size: 4, frozen: 0.8} for drawn boards, or rows such as [SFF, FHF, FFG]"
)]
pub enum MapConfig {
    /// Rows of S, F, H and G.
    Rows(Vec<String>),
    /// Drawn by the task.
    Drawn(DrawnMapConfig),
}

/// The law that boards are drawn from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DrawnMapConfig {
    /// Rows and columns.
    pub size: usize,
    /// The probability that a cell is no hole.
    pub frozen: f64,
}

impl Default for DrawnMapConfig {
    fn default() -> Self {
        Self { size: 4, frozen: 0.8 }
    }
}

impl Default for FrozenLakeConfig {
    fn default() -> Self {
        Self {
            map: MapConfig::Drawn(DrawnMapConfig::default()),
            slip: 2.0 / 3.0,
            view: View::default(),
            rules: Rules::default(),
        }
    }
}

impl FrozenLakeConfig {
    /// The environment.
    ///
    /// # Errors
    /// As [`Lake::parse`] and [`FrozenLake::new`].
    pub fn environment(&self) -> Result<FrozenLake> {
        let source = match &self.map {
            MapConfig::Rows(rows) => LakeSource::Fixed(Lake::parse(rows)?),
            MapConfig::Drawn(DrawnMapConfig { size, frozen }) => {
                LakeSource::Drawn { size: *size, frozen: *frozen }
            }
        };
        FrozenLake::new(source, self.slip, self.view)
    }
}

/// Countdown.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CountdownConfig {
    /// The tasks.
    pub tasks: CountdownTasks,
    /// What a task can be solved with.
    pub solvable: Solvable,
    /// Whether an expression must use all numbers to be right.
    pub use_all: bool,
    /// What holds in every environment.
    pub rules: Rules,
}

/// A file of tasks, or the law that they are drawn from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "expected {count: [3, 4], max_number: 99, target: [10, 100]} for drawn tasks, or a path"
)]
pub enum CountdownTasks {
    /// JSONL of `target` and `nums`.
    File(PathBuf),
    /// Drawn by the task's seed.
    Drawn(Generator),
}

impl Default for CountdownConfig {
    fn default() -> Self {
        Self {
            tasks: CountdownTasks::Drawn(Generator::default()),
            solvable: Solvable::default(),
            use_all: true,
            rules: Rules::default(),
        }
    }
}

impl CountdownConfig {
    /// The environment.
    ///
    /// # Errors
    /// As [`Countdown::drawn`] and [`Countdown::from_file`].
    pub fn environment(&self) -> Result<Countdown> {
        match &self.tasks {
            CountdownTasks::File(path) => Countdown::from_file(path, self.solvable, self.use_all),
            CountdownTasks::Drawn(law) => Countdown::drawn(*law, self.solvable, self.use_all),
        }
    }
}

/// Questions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuestionsConfig {
    /// JSONL in the form of MetaMathQA or GSM8K.
    pub path: PathBuf,
    /// When an answer is right.
    #[serde(default)]
    pub comparison: Comparison,
    /// What holds in every environment.
    #[serde(default)]
    pub rules: Rules,
}

impl QuestionsConfig {
    /// The environment.
    ///
    /// # Errors
    /// As [`Questions::from_file`].
    pub fn environment(&self) -> Result<Questions> {
        Questions::from_file(&self.path, self.comparison)
    }
}
