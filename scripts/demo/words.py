# The word lists of the demo corpus: names, general words, and the worlds in which its stories happen.
# Entries are separated by ";" so that a list stays readable; an entry may itself be a template.
from __future__ import annotations


def _list(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(";") if entry.strip()]


GIRLS = _list(
    "Anna; Mia; Clara; Lena; Rosa; Nora; Ida; Elsa; Lucy; Emma; Maya; Zoe; Ruth; Alice; Greta; Hanna; Julia; Kira; "
    "Lily; Marta; Nina; Olga; Paula; Sara; Tessa; Vera; Wanda; Yara; Amina; Bela; Carmen; Daria; Edith; Fiona; Gina; "
    "Helen; Iris; Jana; Kate; Leila; Mina; Nadia; Petra; Rita; Sofia; Tara; Una; Viola; Willa; Zara; Mei; Aiko; Priya"
)
BOYS = _list(
    "Tom; Ben; Max; Leo; Paul; Oscar; Finn; Hugo; Jack; Sam; Tim; Adam; Bruno; Carl; David; Emil; Felix; George; "
    "Henry; Ivan; Jonas; Karl; Lukas; Martin; Noah; Otto; Peter; Robin; Simon; Theo; Victor; Walter; Yusuf; Arthur; "
    "Boris; Daniel; Erik; Frank; Gustav; Harry; Isaac; Jan; Kofi; Liam; Milo; Nils; Omar; Pedro; Ravi; Stefan; "
    "Kenji; Anton"
)
ANIMAL_NAMES = _list(
    "Rusty; Pip; Clover; Bramble; Shadow; Pepper; Hazel; Biscuit; Moss; Ginger; Patch; Juniper; Snowy; Whisper; "
    "Acorn; Button; Thistle; Copper; Maple; Pebble; Willow; Sunny; Fern; Sparrow; Barley; Poppy"
)
ROBOT_NAMES = _list(
    "Bolt; Sprocket; Tin; Cog; Widget; Rivet; Dot; Beep; Piston; Gizmo; Spark; Coil; Relay; Pixel; Axle"
)
STORY_ANIMALS = _list(
    "fox; rabbit; hedgehog; badger; mouse; squirrel; owl; otter; bear; hare; goat; donkey; duck; cat; dog; beaver; "
    "frog; mole; deer; crow; goose; turtle; lamb; pony; dragon; penguin; elephant; lion; monkey; wolf; whale; unicorn"
)

GENERAL: dict[str, list[str]] = {
    "adj": _list(
        "small; old; quiet; bright; strange; heavy; wooden; dusty; golden; silver; broken; lovely; simple; tiny; "
        "blue; red; green; yellow; round; shiny; worn; smooth; forgotten; painted; beautiful; curious; plain; rusty; "
        "soft"
    ),
    "mood": _list(
        "happy; proud; tired; calm; curious; hopeful; nervous; excited; thoughtful; cheerful; restless; lonely; "
        "brave; grateful; patient; worried; surprised; relieved; shy; serious"
    ),
    "kind": _list(
        "kind; clever; patient; gentle; careful; stubborn; cheerful; brave; honest; quiet; curious; generous; "
        "hard-working; funny; wise; shy; friendly; thoughtful"
    ),
    "slowly": _list(
        "slowly; carefully; quietly; quickly; gently; patiently; eagerly; silently; gladly; calmly; bravely; without "
        "a word; with a smile; with great care; at last; in silence; one step at a time"
    ),
    "colour": _list("red; blue; green; yellow; white; black; brown; orange; purple; grey; pink; golden; silver"),
    "number": _list("two; three; four; five; six; seven; eight; nine; ten; twelve; twenty"),
    "timespan": _list(
        "an hour; two hours; three days; a week; a whole day; half the night; a month; many years; a long time; a "
        "while; several days; most of the morning; the whole winter; ten minutes; a few minutes"
    ),
    "moment": _list(
        "one morning; one evening; one day; one afternoon; one night; early one morning; late one evening; on a "
        "{grey} day; on the first day of {season}; in the middle of the night; just before dawn; after lunch; on a "
        "Sunday; on a Monday morning; at sunset; one {season} morning; one {season} evening; that week; at noon"
    ),
    "later": _list(
        "later; after a while; before long; soon; that evening; the next morning; the next day; a little later; an "
        "hour later; in the afternoon; not long afterwards; when the sun went down; as night fell; after supper; at "
        "last; a few minutes later; by evening; before anyone noticed"
    ),
    "season": _list("spring; summer; autumn; winter"),
    "grey": _list("grey; sunny; cold; windy; rainy; warm; foggy; bright; snowy; quiet; hot; cloudy; stormy"),
    "month": _list("January; February; March; April; May; June; July; August; September; October; November; December"),
    "day": _list("Monday; Tuesday; Wednesday; Thursday; Friday; Saturday; Sunday"),
    "food": _list(
        "bread and cheese; a bowl of soup; apple pie; hot chocolate; warm milk; pancakes; a plate of noodles; "
        "roasted potatoes; tea with honey; ginger biscuits; fresh bread; vegetable stew; rice with beans; plum cake; "
        "a boiled egg; tomato soup; cherry pie; a sandwich; baked apples; a slice of cake; mushroom soup; porridge"
    ),
    "family": _list(
        "mother; father; grandmother; grandfather; sister; brother; aunt; uncle; cousin; neighbour; teacher"
    ),
    "box": _list("box; drawer; basket; cupboard; chest; bag; sack; jar; suitcase; tin; barrel"),
    "material": _list("wood; iron; glass; paper; stone; silver; copper; wool; leather; clay; brass; straw"),
    "virtue": _list(
        "patience; kindness; courage; honesty; friendship; hard work; gentleness; listening; sharing; trust; hope; "
        "curiosity; calm; imagination"
    ),
    "sky": _list(
        "the sun was shining; rain was falling; the wind was blowing; snow lay on the ground; fog covered "
        "everything; the sky was grey; the stars were out; the moon was bright; the air was warm; it was very cold; "
        "clouds hung low over the hills; a light rain had begun; the sun had just come up; it was getting dark"
    ),
    "hobby": _list(
        "reading; painting; swimming; fishing; singing; cooking; gardening; dancing; running; drawing; writing "
        "letters; playing the piano; playing chess; building models; walking in the rain; looking at the stars; "
        "baking; knitting; collecting stones; repairing clocks; riding a bicycle; watching birds; climbing trees; "
        "telling stories"
    ),
    "fruit": _list(
        "apple; pear; plum; cherry; banana; orange; lemon; grape; peach; melon; mango; kiwi; fig; strawberry; raspberry"
    ),
    "vegetable": _list(
        "carrot; potato; onion; tomato; cabbage; bean; pea; pumpkin; leek; beet; cucumber; spinach; pepper; turnip"
    ),
    "country_food": _list("soup; bread; salad; stew; pancakes; pie; omelette; porridge; tea; rice; noodles; jam; cake"),
    "instrument": _list("violin; piano; flute; drum; guitar; trumpet; harp; cello; accordion; fiddle"),
}

# Each world: where a story happens, spots to go to, things to find or lose, machines to mend, people, animals, sights.
_WORLDS: dict[str, dict[str, str]] = {
    "village": {
        "where": "in a small village; in a small village by the river; in a village at the foot of a hill; in a quiet "
        "village; at the edge of a small village; in a village between two forests; in a village with one long street",
        "spot": "the well; the mill; the market square; the old bridge; the church; the bakery; the village green; "
        "the blacksmith's shop; the barn; the crooked house at the end of the road; the school; the river bank",
        "thing": "lantern; silver coin; wooden flute; red scarf; brass key; old map; music box; clay pot; letter; "
        "ring; wooden horse; basket of eggs; painted plate; ribbon; copper kettle; book of songs",
        "machine": "mill wheel; village clock; water pump; church bell; old tractor; oven in the bakery; cart",
        "job": "baker; miller; blacksmith; farmer; carpenter; teacher; shepherd; weaver; potter; postman; shoemaker",
        "sight": "Smoke rose from the chimneys.; Hens walked across the road.; The smell of fresh bread filled the "
        "street.; Children played by the well.; A dog slept in front of the bakery.; The bells rang for noon.; "
        "Lights came on in one window after another.; Two old men were talking on a bench.",
    },
    "sea": {
        "where": "in a harbour town; on a small island; in a fishing village; on the coast; in a house by the sea; "
        "at the end of a long beach; on a ship called the {shipname}; in a lighthouse far from the land",
        "spot": "the harbour; the pier; the beach; the lighthouse; the cliffs; the fish market; a hidden cave; "
        "the shipyard; the end of the dock; the sand bank; the tide pools; the captain's cabin",
        "thing": "shell; compass; fishing net; bottle with a letter inside; rope; telescope; ship's bell; pearl; oar; "
        "sea chart; anchor; wooden boat; glass float; captain's hat; flag; whistle",
        "machine": "boat engine; lighthouse lamp; ship's engine; crane; radio; fog horn; winch; old motorboat",
        "job": "fisherman; sailor; captain; lighthouse keeper; diver; boat builder; cook; net maker; harbour master",
        "sight": "Waves rolled slowly onto the sand.; Gulls cried above the boats.; The tide was going out.; "
        "Salt hung in the air.; Far out, a white sail moved along the horizon.; The boats rocked at their ropes.; "
        "The water was as smooth as glass.; Foam ran up the beach and back again.",
        "shipname": "Morning Star; Silver Gull; Northern Wind; Blue Lady; Hope; Seahorse; Old Martha",
    },
    "railway": {
        "where": "at a small railway station; in a town where all the trains stopped; beside the railway line; "
        "on the night train; in a signal house; at the last station on the line; in the engine shed",
        "spot": "the platform; the signal house; the engine shed; the tunnel; the ticket office; the last wagon; "
        "the iron bridge; the waiting room; the water tower; the dining car; the side track; the workshop",
        "thing": "ticket; brown suitcase; whistle; oil lamp; pocket watch; umbrella; green flag; timetable; letter; "
        "hat; toolbox; parcel; coal shovel; silver button; travel diary; brass lamp",
        "machine": "engine; old engine; steam engine; engine of the train; old engine of the train; signal; "
        "little locomotive; station clock; diesel engine; water pump; engine of the night train",
        "job": "train driver; conductor; station master; mechanic; ticket seller; signalman; stoker; porter; engineer",
        "sight": "Steam drifted over the platform.; The rails shone in the rain.; A whistle sounded far away.; "
        "Passengers looked out of the windows.; The wheels sang on the rails.; Somebody was asleep on a bench.; The "
        "clock above the door showed {number} minutes to {number}.; The train rolled past fields and rivers.",
    },
    "school": {
        "where": "near a small school; in a town with a very old school; beside a school on a hill; "
        "in a school near the park; in a street behind the school; in a house next to the school",
        "spot": "the library; the playground; the classroom; the music room; the kitchen; the school garden; the gym; "
        "the art room; the long corridor; the roof; the science room; the bus stop",
        "thing": "notebook; pencil; drawing; school bag; library book; globe; paper plane; violin; lunch box; ruler; "
        "paint box; photograph; calculator; chess board; calendar; microscope",
        "machine": "school bell; old computer; printer; projector; school bus; radio; clock on the wall; lift",
        "job": "teacher; librarian; caretaker; music teacher; cook; bus driver; painter; pupil; science teacher",
        "sight": "Chalk dust floated in the light.; The corridors were full of voices.; A ball rolled across the "
        "playground.; Rain ran down the classroom windows.; Somebody was playing the piano upstairs.; The bell rang "
        "twice.; Coats hung in a row beside the door.; The class became very quiet.",
    },
    "forest": {
        "where": "in the middle of a deep forest; at the edge of the forest; under a tall oak tree; in a hut in the "
        "woods; beside a stream in the forest; in a valley full of trees; in a hollow tree",
        "spot": "the old oak; the stream; the clearing; the waterfall; the hollow log; the pond; the stone circle; "
        "the hunter's hut; the hill of ferns; the narrow path; the berry bushes; the wooden bridge",
        "thing": "acorn; feather; silver leaf; basket of berries; blue stone; nest; walking stick; golden egg; "
        "bell; rope; lantern; mushroom; carved owl; bag of nuts; small drum; red hat",
        "machine": "saw mill; old cart; water wheel; wind chime; stove in the hut; hand mill; wooden lift",
        "job": "forester; woodcutter; mushroom picker; bird watcher; bee keeper; painter; hermit; guide; gardener",
        "sight": "Leaves whispered in the wind.; A bird sang somewhere above.; The moss was soft and wet.; "
        "Sunlight fell between the trees.; An owl called from the dark.; The path smelled of rain and earth.; "
        "Mushrooms stood in a ring.; Something moved behind the ferns.",
    },
    "city": {
        "where": "in a big city; on the top floor of a tall house; in a narrow street; in a city of bridges; "
        "above a small shop; in a busy town; near the central station",
        "spot": "the park; the museum; the market; the roof; the bookshop; the bridge; the tram stop; the theatre; "
        "the corner shop; the fountain; the hospital; the post office",
        "thing": "umbrella; violin; photograph; bicycle; red balloon; parcel; notebook; camera; street map; glove; "
        "key; newspaper; flower pot; old coin; postcard; yellow raincoat",
        "machine": "lift; tram; street lamp; coffee machine; washing machine; radio; bicycle; clock tower; delivery "
        "van",
        "job": "taxi driver; street musician; shopkeeper; doctor; nurse; painter; cook; tailor; clockmaker; bookseller",
        "sight": "Trams rang their bells.; The streets were full of people.; Lights blinked in every window.; "
        "Pigeons walked around the fountain.; Somebody played a song on the corner.; Rain shone on the pavement.; "
        "The smell of coffee came from an open door.; A bus stopped and went on again.",
    },
    "farm": {
        "where": "on a small farm; on a farm beyond the hills; in a farmhouse with a red roof; in the country; "
        "beside a field of wheat; behind a long green hedge",
        "spot": "the barn; the orchard; the pond; the stable; the hen house; the wheat field; the well; the gate; "
        "the hay loft; the pumpkin patch; the meadow; the tool shed",
        "thing": "pumpkin; basket of apples; milk can; horseshoe; straw hat; rope; bell; jar of honey; wooden bucket; "
        "blanket; egg; rake; sack of seeds; saddle; lamp; pie",
        "machine": "tractor; water pump; windmill; milking machine; old truck; plough; engine of the tractor; "
        "generator",
        "job": "farmer; shepherd; stable boy; milkmaid; vet; cheese maker; bee keeper; gardener; fruit seller",
        "sight": "Cows stood in the long grass.; The rooster crowed from the fence.; The wheat moved like water.; "
        "A cat slept in the hay.; Bees hummed around the apple trees.; The smell of hay was everywhere.; Ducks "
        "crossed the pond in a line.; The horses lifted their heads.",
    },
    "mountain": {
        "where": "high in the mountains; in a valley between two mountains; in a hut above the clouds; at the top "
        "of a hill; in a village below the glacier; on a narrow mountain road",
        "spot": "the summit; the pass; the frozen lake; the cave; the hut; the rope bridge; the spring; the cliff; "
        "the ski lift; the stone tower; the meadow; the old mine",
        "thing": "rope; crystal; walking stick; sledge; map; warm blanket; lantern; goat bell; flute; backpack; horn; "
        "compass; pair of boots; golden stone; kettle; carved bear",
        "machine": "cable car; ski lift; snow plough; generator; radio; lamp of the tower; mine wagon; mountain train",
        "job": "guide; goat herder; climber; innkeeper; ranger; wood carver; pilot; map maker; cheese maker",
        "sight": "Snow glittered on the peaks.; An eagle circled high above.; The air was thin and clear.; "
        "Far below, the valley was full of mist.; Goat bells rang on the slope.; A stone rolled down the path.; The "
        "wind sang around the hut.; Clouds moved over the rocks.",
    },
    "kitchen": {
        "where": "in a warm kitchen; in a small restaurant; in the bakery on the corner; in a tea house; "
        "in a kitchen with blue tiles; behind the counter of an inn",
        "spot": "the pantry; the cellar; the market; the herb garden; the oven; the dining room; the back door; the "
        "shop; the kitchen table; the storeroom; the courtyard; the tall cupboard",
        "thing": "recipe book; silver spoon; copper pot; jar of honey; loaf of bread; wooden spoon; cake; tea pot; "
        "basket of lemons; bag of flour; pepper mill; apron; rolling pin; plum tart; jar of spice; bread knife",
        "machine": "oven; stove; coffee machine; mixer; kitchen clock; old fridge; bread machine; toaster",
        "job": "cook; baker; waiter; tea seller; innkeeper; dish washer; market woman; butcher; pastry chef",
        "sight": "Soup bubbled on the stove.; The windows were white with steam.; Flour lay on every shelf.; "
        "It smelled of cinnamon and butter.; Pots hung in a row on the wall.; The fire crackled.; Somebody was "
        "cutting onions.; A pie was cooling by the window.",
    },
    "space": {
        "where": "on a small space station; on a ship between the stars; on the far side of the moon; on a distant "
        "planet; in a tower full of telescopes; in a silver dome on Mars",
        "spot": "the control room; the airlock; the greenhouse; the engine room; the crater; the landing field; the "
        "lab; the observation deck; the cargo hold; the storage bay; the dark tunnel; the red hills",
        "thing": "star map; helmet; glowing stone; small robot; seed; radio; silver box; message; battery; metal "
        "plate; notebook; toolbox; photograph of Earth; memory chip; crystal; lamp",
        "machine": "engine; main engine; radio; air pump; telescope; landing computer; water machine; engine of the "
        "ship; old computer; cooling pump",
        "job": "pilot; astronaut; engineer; scientist; captain; mechanic; gardener; star watcher; radio operator",
        "sight": "The stars did not blink.; The Earth hung like a blue marble in the window.; Lights blinked on the "
        "panel.; Dust floated above the ground.; The station hummed softly.; A comet drew a thin line through the "
        "dark.; It was so quiet that one could hear the air pump.; Two moons rose above the hills.",
    },
    "desert": {
        "where": "at the edge of the desert; in an oasis; in a tent among the dunes; in a town of white houses; "
        "on an old trade road; beside a dry river",
        "spot": "the well; the market; the dunes; the palm trees; the old gate; the ruins; the caravan camp; the "
        "tower; the salt lake; the rock arch; the spice shop; the blue door",
        "thing": "carpet; water jar; silver bracelet; oil lamp; map; bag of dates; drum; blue stone; tea glass; "
        "saddle; old coin; scroll; scarf; copper bowl; mirror; key",
        "machine": "water pump; old truck; wind wheel; radio; generator; jeep; engine of the jeep; lamp of the tower",
        "job": "merchant; camel driver; weaver; potter; guide; story teller; well digger; glass blower; spice seller",
        "sight": "The sand was still warm.; Camels knelt beside the tents.; The moon made the dunes look like silver.; "
        "Hot air trembled above the road.; Tea steamed in small glasses.; The stars were larger than anywhere else.; "
        "A flute played behind the tents.; The wind drew lines in the sand.",
    },
    "workshop": {
        "where": "in a workshop full of tools; in a clockmaker's shop; in a garage at the end of the street; in a "
        "toy shop; in a cellar full of wires; in a busy repair shop; in a small factory",
        "spot": "the workbench; the back room; the yard; the attic; the cellar; the shelf; the office; the gate; "
        "the storeroom; the spare parts shelf; the front window; the paint room",
        "thing": "screwdriver; gear; spring; music box; clock; tin bird; toy train; magnet; brass wheel; hammer; plan; "
        "oil can; lamp; puppet; wooden duck; glass lens",
        "machine": "engine; small engine; clock; robot; radio; flying machine; printing machine; computer; steam "
        "engine; sewing machine; engine on the workbench; music machine",
        "job": "inventor; mechanic; clockmaker; toy maker; engineer; apprentice; carpenter; glass maker; programmer",
        "sight": "Clocks ticked on every wall.; Sparks flew from the bench.; It smelled of oil and wood.; "
        "Tools hung in neat rows.; Small wheels turned behind glass.; A lamp swung above the table.; Shavings "
        "covered the floor.; A machine hummed in the corner.",
    },
    "castle": {
        "where": "in a castle on a hill; in a kingdom far away; behind the walls of an old castle; in a tower of "
        "white stone; at the court of an old king; in a land of lakes",
        "spot": "the throne room; the garden; the tower; the stable; the gate; the dungeon; the library; the great "
        "hall; the bridge; the royal kitchen; the secret stairs; the wishing well",
        "thing": "crown; golden key; silver cup; magic ring; shield; mirror; scroll; sword; harp; candle; red cloak; "
        "crystal ball; rose; old book; bell; feather",
        "machine": "drawbridge; tower clock; fountain; great bell; mill; golden carriage; music clock",
        "job": "messenger; knight; cook; gardener; wizard; guard; minstrel; stable boy; servant; painter",
        "sight": "Flags moved in the wind.; Torches burned along the walls.; A trumpet sounded from the gate.; "
        "The fountain sang in the courtyard.; Swans crossed the moat.; The guards were half asleep.; Music came from "
        "the great hall.; Roses climbed up the tower.",
    },
    "winter": {
        "where": "in a town covered with snow; in a cabin in the far north; beside a frozen lake; in a land of ice; "
        "in a house with frozen windows; on the coldest street of the town",
        "spot": "the frozen lake; the cabin; the ice cave; the sledge track; the shed; the snowy hill; the pine trees; "
        "the station; the shop; the warm kitchen; the bridge; the lookout",
        "thing": "sledge; woollen hat; pair of skates; lantern; red mitten; snow globe; blanket; candle; fishing "
        "rod; bell; snow shovel; scarf; hot kettle; carved fish; ice crystal; fur coat",
        "machine": "snow plough; stove; old truck; heater; radio; motor sledge; engine of the truck; street lamp",
        "job": "postman; ice fisher; sledge driver; ranger; baker; doctor; teacher; wood carver; shopkeeper",
        "sight": "Snow fell without a sound.; Icicles hung from the roof.; The lake was as hard as stone.; "
        "Frost drew flowers on the windows.; Footprints led across the snow.; Green lights moved over the sky.; "
        "Smoke stood straight above the roofs.; The cold bit at every nose.",
    },
}
WORLDS: dict[str, dict[str, list[str]]] = {
    name: {key: _list(text) for key, text in world.items()} for name, world in _WORLDS.items()
}
