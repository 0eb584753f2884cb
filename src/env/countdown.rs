//! Numbers to be put together to a target.
//!
//! Rules of RAGEN's Countdown: `Target: 98, nums: [44, 19, 35]` is to be seen; one answer; 1 for an
//! expression that uses every number exactly once and meets the target, 0.1 for one that uses them and
//! misses, else 0; afterwards `Your answer get REWARD points.` Where it differs:
//!
//! | | RAGEN | here |
//! |---|---|---|
//! | evaluation | Python's `eval`, with `**`, `//`, `%` | [`Expression`]: `+ - * / ( )` and signs |
//! | meets the target | within 1e-5 | exactly |
//! | the right numbers in a text that is no expression | 0.1 | 0 |
//! | tasks | a table of them, those that sums and differences solve | the same table as JSONL, or drawn so that they can be solved |

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use rand::{Rng, RngExt};
use serde::{Deserialize, Serialize};

use super::tasks::{self, Fault};
use super::{Answers, Environment, Expression, Outcome, Rational, Seed, error, require_running};
use crate::error::{Error, Result};

const NAME: &str = "countdown";
/// Draws for one task before the set-up is given up.
const MAX_DRAWS: usize = 10_000;

/// A task.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct CountdownTask {
    /// What the expression is to come to.
    pub target: i64,
    /// The numbers to use.
    pub nums: Vec<u32>,
}

impl CountdownTask {
    /// The product of all (number + 1), if no expression of the numbers can exceed 128 bits.
    fn size(&self) -> Option<i128> {
        self.nums.iter().try_fold(1_i128, |size, number| size.checked_mul(i128::from(*number) + 1))
    }

    /// Whether some choice of signs before the numbers, all of them, gives the target.
    fn is_solved_by_signs(&self) -> bool {
        let sums = self.nums.iter().fold(BTreeSet::from([0_i64]), |sums, number| {
            let number = i64::from(*number);
            sums.into_iter().flat_map(|sum| [sum + number, sum - number]).collect()
        });
        sums.contains(&self.target)
    }
}

/// What a task can be solved with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Solvable {
    /// Sums and differences, as RAGEN wants it: other tasks of a file are left out.
    #[default]
    Signs,
    /// All four operations. A file's tasks are all taken.
    Any,
}

/// The law of drawn tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Generator {
    /// Fewest and most numbers.
    pub count: (usize, usize),
    /// The numbers are 1 to this.
    pub max_number: u32,
    /// Least and largest target.
    pub target: (i64, i64),
}

impl Default for Generator {
    fn default() -> Self {
        Self { count: (3, 4), max_number: 99, target: (10, 100) }
    }
}

impl Generator {
    fn check(&self) -> Result<()> {
        let (fewest, most) = self.count;
        if !(1..=most).contains(&fewest) || most > 16 {
            return Err(error(
                NAME,
                format!("count: expected 1 to 16 numbers, fewest first, found {fewest} to {most}"),
            ));
        }
        if self.max_number == 0 {
            return Err(error(NAME, "max_number: expected at least 1, found 0"));
        }
        if self.target.0 > self.target.1 {
            return Err(error(
                NAME,
                format!("target: expected the least first, found {:?}", self.target),
            ));
        }
        let largest = CountdownTask { target: 0, nums: vec![self.max_number; most] };
        require_exact(&largest).map_err(|problem| error(NAME, format!("max_number: {problem}")))
    }

    /// Numbers, and a target that an expression of them comes to.
    fn draw(&self, solvable: Solvable, random: &mut impl Rng) -> Result<CountdownTask> {
        for _ in 0..MAX_DRAWS {
            let count = random.random_range(self.count.0..=self.count.1);
            let nums: Vec<u32> =
                (0..count).map(|_| random.random_range(1..=self.max_number)).collect();
            let Some(target) = target(&nums, solvable, random) else { continue };
            if (self.target.0..=self.target.1).contains(&target) {
                return Ok(CountdownTask { target, nums });
            }
        }
        Err(error(
            NAME,
            format!(
                "target: expected one from {} to {} among {MAX_DRAWS} drawn expressions, found none; widen it",
                self.target.0, self.target.1
            ),
        ))
    }
}

/// What a random expression of all the numbers comes to, if that is a whole number.
fn target(nums: &[u32], solvable: Solvable, random: &mut impl Rng) -> Option<i64> {
    let mut values: Vec<Rational> = nums.iter().map(|number| Rational::whole(*number)).collect();
    let operations = match solvable {
        Solvable::Signs => 2,
        Solvable::Any => 4,
    };
    while values.len() > 1 {
        let left = values.swap_remove(random.random_range(0..values.len()));
        let right = values.swap_remove(random.random_range(0..values.len()));
        values.push(match random.random_range(0..operations) {
            0 => left.plus(right),
            1 => left.minus(right),
            2 => left.times(right),
            _ => left.over(right),
        }?);
    }
    i64::try_from(values.first()?.as_whole()?).ok()
}

/// What an answer deserves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grade {
    /// It meets the target with the numbers that were given.
    Right,
    /// It uses every number exactly once, and misses.
    Missed,
    /// It is no expression, or one of other numbers.
    Unusable,
}

impl Grade {
    /// The reward: 1, 0.1 or 0.
    pub fn reward(self) -> f64 {
        match self {
            Self::Right => 1.0,
            Self::Missed => 0.1,
            Self::Unusable => 0.0,
        }
    }
}

/// Grades an answer. With `use_all` only an expression of all numbers can be right; without, one of some
/// of them too.
pub fn grade(answer: &str, task: &CountdownTask, use_all: bool) -> Grade {
    let Ok(expression) = Expression::parse(answer) else { return Grade::Unusable };
    let Some(left) = left_over(&expression.numbers(), &task.nums) else { return Grade::Unusable };
    let uses_all = left.is_empty();
    let meets = expression.value().and_then(Rational::as_whole) == Some(task.target.into());
    if meets && (uses_all || !use_all) {
        Grade::Right
    } else if uses_all {
        Grade::Missed
    } else {
        Grade::Unusable
    }
}

/// The given numbers less the used ones; none if a used one was not given, or not so often.
fn left_over(used: &[u64], given: &[u32]) -> Option<Vec<u32>> {
    let mut left = given.to_vec();
    for number in used {
        let place = left.iter().position(|given| u64::from(*given) == *number)?;
        left.swap_remove(place);
    }
    Some(left)
}

/// That arithmetic on these numbers stays exact.
fn require_exact(task: &CountdownTask) -> std::result::Result<(), String> {
    match task.size() {
        Some(_) => Ok(()),
        None => {
            Err(format!("expected numbers whose product fits into 128 bits, found {:?}", task.nums))
        }
    }
}

/// Where tasks come from.
#[derive(Clone, Debug)]
enum Source {
    Drawn(Generator),
    Listed(Arc<[CountdownTask]>),
}

/// The environment.
#[derive(Clone, Debug)]
pub struct Countdown {
    source: Source,
    solvable: Solvable,
    use_all: bool,
    task: CountdownTask,
    verdict: Option<Grade>,
}

impl Countdown {
    /// Tasks drawn by their seed.
    ///
    /// # Errors
    /// If the law is none, or no task can be drawn from it.
    pub fn drawn(generator: Generator, solvable: Solvable, use_all: bool) -> Result<Self> {
        generator.check()?;
        Self::new(Source::Drawn(generator), solvable, use_all)
    }

    /// Tasks from JSONL, `{"target": 98, "nums": [44, 19, 35]}` a line, in turn: task `t` is line `t`
    /// modulo their number. Other keys are ignored.
    ///
    /// # Errors
    /// If the file cannot be read, breaks the format, or no task is left.
    pub fn from_file(path: &Path, solvable: Solvable, use_all: bool) -> Result<Self> {
        let mut tasks = tasks::read(path, |line| {
            let task: CountdownTask = tasks::json(line)?;
            if task.nums.is_empty() {
                return Err(Fault {
                    field: "nums",
                    problem: "expected numbers, found none".into(),
                });
            }
            require_exact(&task).map_err(|problem| Fault { field: "nums", problem })?;
            Ok(task)
        })?;
        if solvable == Solvable::Signs {
            tasks.retain(CountdownTask::is_solved_by_signs);
        }
        if tasks.is_empty() {
            return Err(Error::Rollouts {
                path: path.to_path_buf(),
                problem: "expected tasks that sums and differences of all numbers solve, found none; set solvable: any".into(),
            });
        }
        Self::new(Source::Listed(tasks.into()), solvable, use_all)
    }

    fn new(source: Source, solvable: Solvable, use_all: bool) -> Result<Self> {
        let task = source.task(solvable, Seed::default())?;
        Ok(Self { source, solvable, use_all, task, verdict: None })
    }
}

impl Source {
    fn task(&self, solvable: Solvable, seed: Seed) -> Result<CountdownTask> {
        match self {
            Self::Drawn(generator) => generator.draw(solvable, &mut seed.task_generator()),
            Self::Listed(tasks) => Ok(tasks::in_turn(tasks, seed).clone()),
        }
    }
}

impl Environment for Countdown {
    fn name(&self) -> &str {
        NAME
    }

    fn instruction(&self) -> String {
        let numbers = if self.use_all { "all of the numbers" } else { "some of the numbers" };
        format!(
            "Countdown: write an expression that equals the target. Use {numbers}, each once, with + - * / and parentheses. To get 4 from [3, 5, 2], for example: 2 + 5 - 3"
        )
    }

    fn answers(&self) -> Answers {
        Answers::Text
    }

    fn max_actions(&self) -> usize {
        1
    }

    fn reset(&mut self, seed: Seed) -> Result<()> {
        self.task = self.source.task(self.solvable, seed)?;
        self.verdict = None;
        Ok(())
    }

    fn observe(&self) -> String {
        match self.verdict {
            None => format!("Target: {}, nums: {:?}", self.task.target, self.task.nums),
            Some(grade) => format!("Your answer get {} points.", grade.reward()),
        }
    }

    fn act(&mut self, action: &str) -> Result<Option<Outcome>> {
        require_running(NAME, self.verdict.is_some())?;
        let grade = grade(action, &self.task, self.use_all);
        self.verdict = Some(grade);
        let reward = grade.reward();
        let success = grade == Grade::Right;
        Ok(Some(Outcome { reward, done: true, success, effective: reward > 0.0 }))
    }

    fn fork(&self) -> Result<Box<dyn Environment>> {
        Ok(Box::new(self.clone()))
    }
}
